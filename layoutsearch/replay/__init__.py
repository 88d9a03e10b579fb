"""Recorded measurements of whole search spaces, and searches that run on them in simulated time."""
