"""Autotuner over layout assignments for Apache TVM."""

from layoutsearch._pins import check_pins

check_pins()

__version__ = "0.1.0"
