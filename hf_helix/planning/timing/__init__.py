"""Times: profiles of operators, cluster descriptions, the clock of windows, and predictions."""
