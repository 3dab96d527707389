"""Every private or unstable name of another package that hf_helix calls, reads or sets.

In:   nothing.
Out:  a table, which `check` compares with what is installed and docs/upstream.md shows.
Must hold: it has a row for every such name and no other (tests/test_upstream.py). Unstable are names with an
underscore, and those of modules that the package's documentation leaves out.
"""

from __future__ import annotations

from hf_helix.upstream.of_others import OTHERS
from hf_helix.upstream.of_torch import TORCH
from hf_helix.upstream.of_transformers import TRANSFORMERS
from hf_helix.upstream.rows import Used

USED: tuple[Used, ...] = (*TRANSFORMERS, *OTHERS, *TORCH)
