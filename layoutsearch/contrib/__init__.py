"""Optional parts: each needs an extra of its own."""
