"""Plans to compare with: the two strands in turn, the paper's, and one strand whose collectives are cut into tiles."""
