"""Transformers models as operator graphs."""
