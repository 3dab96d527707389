"""Times: profiles of operators, with recompute; a cluster; the clock of simulated windows."""
