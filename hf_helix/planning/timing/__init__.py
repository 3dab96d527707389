"""Times: profiles of operators, the clock that simulates windows, and predictions."""
