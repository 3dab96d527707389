"""Graphs, plans, placements and schedules as plain data. Imports the standard library only; runs without torch."""
