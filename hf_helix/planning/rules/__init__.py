"""Rules: the named ways to make plans, the paper's among them."""
