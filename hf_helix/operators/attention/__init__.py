"""Attention: partial attention with its log-sum-exp, its kernels, the ring over ranks, rotary embedding."""
