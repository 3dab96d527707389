"""Weights that are spread over the ranks with copies of them: how they lie, and how they are gathered for operators."""
