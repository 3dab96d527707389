"""Mixtures of experts: tokens to the ranks of their experts, and back."""
