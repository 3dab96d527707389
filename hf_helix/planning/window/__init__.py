"""Windows: the micro-batches of an optimizer step as numbers, the passes over a window, and the programs of ranks."""
