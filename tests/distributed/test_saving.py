"""Checkpoints are those of `save_pretrained` of the whole model, to the byte, whoever writes them."""

from __future__ import annotations
