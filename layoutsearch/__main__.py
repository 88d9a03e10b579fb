"""`python -m layoutsearch` is the command line."""

from __future__ import annotations

from layoutsearch.cli.main import main

main()
