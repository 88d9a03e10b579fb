"""Tensor expressions of the operators in every candidate layout: what is computed, never how fast."""
