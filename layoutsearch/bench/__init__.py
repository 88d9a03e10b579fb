"""Fair comparison of compiled models and other runtimes."""
