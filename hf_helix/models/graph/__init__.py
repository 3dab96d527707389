"""Declaring the parts of a model as operators of a unit."""
