"""Choice of a schedule: simulated slots, memory, search; the scheduler of a run."""
