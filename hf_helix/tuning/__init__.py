"""Tuning: measures this machine, makes plans from the measurement, and keeps the fastest."""
