"""Linears with explicit input and weight gradients, low-rank adapters, and linears of experts."""
