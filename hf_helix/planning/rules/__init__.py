"""Rules: the named ways to make plans, and the plans to compare with (the paper's; collectives cut in tiles)."""
