"""Gradients after backward: reduction over the ranks.

buckets  groups of gradients for a joint reduction
reduce   the reductions of a window, on a stream; the norm of the gradient
"""
