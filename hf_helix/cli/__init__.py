"""The command `hf-helix`: a command is a dataclass of its options, and a file."""

from hf_helix.cli.main import main

__all__ = ["main"]
