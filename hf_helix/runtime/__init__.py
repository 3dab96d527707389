"""Runs plans: streams, executor (runs a program), runner (runs a window), gradient reduction, CUDA graphs.

Never imports transformers or accelerate.
"""
