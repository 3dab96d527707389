"""Runs plans: streams, executor (runs a program), runner (runs a window), sums of gradients, CUDA graphs.

Never imports transformers or accelerate.
"""
