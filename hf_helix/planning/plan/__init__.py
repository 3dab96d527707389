"""Plans: orders of issue for the operators of a rank, and searches for a fast order."""
