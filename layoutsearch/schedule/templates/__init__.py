"""One template a module: the legal schedules of a kernel, best guesses first, and the code each of them emits."""
