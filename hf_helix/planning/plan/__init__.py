"""Plans: orders of issue for the operators of a rank, searches for a fast order, the programs of ranks, predictions."""
