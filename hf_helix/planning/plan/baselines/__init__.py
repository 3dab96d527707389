"""Plans to compare with: two strands in turn, the paper's plan, and a single strand with collectives cut in tiles."""
