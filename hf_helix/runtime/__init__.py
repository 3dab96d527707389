"""Runs plans: mesh, streams, executor (runs a program), runner (runs a window), profiler and tuning.

Never imports transformers or accelerate.
"""
