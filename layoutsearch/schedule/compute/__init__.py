"""Tensor-expression definitions of the operators in every candidate layout. They say what is computed, never how fast."""
