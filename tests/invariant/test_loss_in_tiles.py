"""A loss in tiles of tokens and words is the loss of the unsplit model, and so are its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from invariant.classes import Case
from invariant.harness import check, windows
from support.derived_models import HOME

from hf_helix.operators import vocab_tiles

SLOW = pytest.mark.slow
TIED = {"tie_word_embeddings": True}
GEMMA = {"family": f"{HOME}gemma2"}  # has a softcap

CASES: list[Any] = [
    ("llama", {}, "", {}),
    ("llama", TIED, "tp2", {}),
    ("llama", {}, "tp2", {}),
    ("llama", {}, "pp2", {}),
    ("llama", TIED, "pp2", {"spread_vocabulary": True}),
    ("llama", {}, "cp2", {}),
    ("llama", {}, "dp2", {"shard_parameters": True}),
    ("gpt2", {"family": "gpt2"}, "tp2", {}),
    ("gemma2", GEMMA, "tp2", {}),
    pytest.param("gemma2", GEMMA, "", {}, marks=SLOW),
    pytest.param("gemma2", GEMMA, "pp2", {}, marks=SLOW),
    pytest.param("llama", {}, "tp2+pp2", {}, marks=SLOW),
    pytest.param("llama", {}, "tp2+pp2", {"spread_vocabulary": True}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "model", "layout", "options"), CASES)
def test_as_the_unsplit_model(
    name: str, model: dict[str, Any], layout: str, options: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 4}
    case = Case(f"{name} {layout} in tiles", {**layers, **model}, layout, "left", options=options)
    check(cluster_of, tmp_path, case, job="invariant.test_loss_in_tiles:windows_in_tiles")


# -- in the processes of a cluster ---------------------------------------------------------------------------------


def windows_in_tiles(**given: Any) -> Any:
    """Windows whose logits are never whole."""
    usual = vocab_tiles.WHOLE, vocab_tiles.TOKENS, vocab_tiles.ROWS
    vocab_tiles.WHOLE, vocab_tiles.TOKENS, vocab_tiles.ROWS = 0, 7, 30
    try:
        return windows(**given)
    finally:
        vocab_tiles.WHOLE, vocab_tiles.TOKENS, vocab_tiles.ROWS = usual
