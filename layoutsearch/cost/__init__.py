"""What kernels and layout changes cost: bounds that hold, and predictions learned from measurements."""
