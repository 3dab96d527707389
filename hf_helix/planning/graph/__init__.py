"""Operator graphs: declared forward, derived backward."""
