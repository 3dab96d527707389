"""Operators on tensors: forward, input gradient, weight gradient; and the units made of them."""
