"""Pipeline schedules as data: actions, placements of stages, named schedules, checks."""
