"""Plans to compare with: the paper's plan, and a single strand with collectives cut in tiles."""
