"""Times: profiles of operators, the clock of simulated windows, and predictions."""
