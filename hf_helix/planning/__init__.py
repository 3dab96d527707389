"""Graphs, plans, folds and schedules as plain data. Imports the standard library only; runs without torch."""
