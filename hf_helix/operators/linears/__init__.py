"""Linears with explicit input and weight gradients, and low-rank adapters."""
