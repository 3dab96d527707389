"""Windows: the work of all ranks for an optimizer step as numbers, the passes over a window, and the programs."""
