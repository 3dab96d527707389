"""Windows: the micro-batches of an optimizer step as numbers, and the passes over a window."""
