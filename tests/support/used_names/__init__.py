"""Every private or unstable name of another package that hf_helix calls, reads or sets: test_upstream.py compares the
table with what is installed, so that a change is found before users meet it."""

from __future__ import annotations

from support.used_names.of_others import OTHERS
from support.used_names.of_torch import TORCH
from support.used_names.of_transformers import TRANSFORMERS
from support.used_names.rows import Used

USED: tuple[Used, ...] = (*TRANSFORMERS, *OTHERS, *TORCH)
