"""The version of this package, by itself so that every part of it can import it."""

__version__ = "0.1.0"
