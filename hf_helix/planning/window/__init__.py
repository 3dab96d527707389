"""Windows: what the ranks run for an optimizer step, as numbers, its passes, and the programs that come of it."""
