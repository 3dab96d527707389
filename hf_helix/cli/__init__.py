"""The command `hf-helix`, one command a file."""

from hf_helix.cli.main import main

__all__ = ["main"]
