"""Where the repository is, for tests that read its pages or run its scripts."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
