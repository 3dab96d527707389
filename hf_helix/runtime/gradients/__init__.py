"""Gradients after backward: the memory in which they lie, and their sums over ranks."""
