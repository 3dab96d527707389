"""The acceptance on a GPU, in pieces: `python -m benchmarks.gpu` from the root of the repository."""
