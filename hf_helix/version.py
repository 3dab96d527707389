"""The version of this package, by itself so that every room can import it."""

__version__ = "0.1.0"
