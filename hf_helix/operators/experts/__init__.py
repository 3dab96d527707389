"""Experts: routing, exchange of tokens, and linears of experts."""
