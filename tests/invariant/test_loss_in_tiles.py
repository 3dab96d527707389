"""A loss in tiles of tokens and words is the loss of the unsplit model, and so are its gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from invariant.classes import Case
from invariant.harness import check, windows
from support import jobs
from support.derived_models import HOME
from support.marks import slow

from hf_helix.operators.vocabulary import head as vocab_tiles

TIED = {"tie_word_embeddings": True}
GEMMA = {"family": f"{HOME}gemma2"}  # has a softcap

CASES: list[Any] = [
    slow("llama", {}, "", {}),
    ("llama", TIED, "tp2", {}),
    ("llama", {}, "pp2", {}),
    slow("llama", {}, "cp2", {}),
    slow("gpt2", {"family": "gpt2"}, "tp2", {}),
    ("gemma2", GEMMA, "tp2", {}),
    slow("llama", {}, "tp2+pp2", {}),
]


@pytest.mark.parametrize(("name", "model", "layout", "options"), CASES)
def test_as_the_unsplit_model(
    name: str, model: dict[str, Any], layout: str, options: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 4}
    case = Case(f"{name} {layout} in tiles", {**layers, **model}, layout, "left", options=options)
    check(cluster_of, tmp_path, case, job="invariant.test_loss_in_tiles:windows_in_tiles")


SPREAD = {"pp_size": 2, "schedule": "auto", "spread_vocabulary": True}


@pytest.mark.parametrize(
    ("ranks", "options", "model"),
    [
        (2, SPREAD, {"num_hidden_layers": 4, **TIED}),
        slow(2, {"shard_parameters": True}, {}),
        slow(2, {"shard_optimizer": True, "recompute": "full"}, TIED),
        slow(4, {**SPREAD, "pp_size": 4}, {"num_hidden_layers": 8}),
    ],
)
def test_as_the_stock_trainer(ranks: int, options: dict[str, Any], model: dict[str, Any], like_stock: Any) -> None:
    """Where weights are kept in other ways; evaluated after training, with whole logits."""
    like_stock(ranks, {"plan": "greedy", "cache": False, **options}, train_in_tiles, model=model)


# -- in the processes of a cluster ---------------------------------------------------------------------------------


def windows_in_tiles(**given: Any) -> Any:
    with in_tiles():
        return windows(**given)


def train_in_tiles(folder: str, helix: dict[str, Any] | None, **given: Any) -> dict[str, Any]:
    with in_tiles():
        return jobs.train(folder, helix, **given)


@contextmanager
def in_tiles() -> Iterator[None]:
    """Returns a context in which logits are never whole in training."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("WHOLE", 0), ("TOKENS", 7), ("ROWS", 30)):
            patched.setattr(vocab_tiles, name, value)
        yield
