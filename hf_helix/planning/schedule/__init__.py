"""Pipeline schedules as data: actions, placements, named schedules, checks, simulation, search."""
