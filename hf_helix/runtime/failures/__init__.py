"""Failures: every rank ends soon when one fails, and says which one it was."""
