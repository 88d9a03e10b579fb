"""Lies here so that pytest puts the top of the repository on the path: tests import `tests.models`."""
