"""Checkpoints to go on from: whole or not there, and for any layout (docs/checkpoints.md)."""
