"""The version of hf_helix."""

__version__ = "0.1.0"
