"""Measurements of operators, windows, transfers and memory on this machine."""
