"""Operator graphs: declared forward, derived backward, with recompute."""
