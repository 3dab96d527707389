"""A family that needs a proof proves itself before a run, once, and a run is as it would be without."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import make_trainer
from support.mistaken_families import WithoutSum

from hf_helix.models import registry
from hf_helix.models.derived.family import Family
from hf_helix.models.families.llama import Llama

PROVEN = "LlamaForCausalLM: derived from the model; equal to the unsplit model at "


def test_the_first_run_proves_and_later_ones_know(cluster_of: Any, tmp_path: Any) -> None:
    ranks = cluster_of(2).run(run_three_times, folder=str(tmp_path), cache=str(tmp_path / "cache"))
    declared, first, second = ranks[0]
    assert PROVEN not in declared["said"]
    assert f"{PROVEN}tp_size=2 (" in first["said"]
    assert PROVEN not in second["said"]
    assert declared["losses"] == first["losses"] == second["losses"]


@pytest.mark.slow
def test_a_spread_vocabulary_is_proven_by_itself(cluster_of: Any, tmp_path: Any) -> None:
    said, _ = cluster_of(2).run(build_with_and_without, folder=str(tmp_path), cache=str(tmp_path / "cache"))
    assert [PROVEN in each for each in said] == [True, True]


def test_a_family_that_is_not_equal_is_not_trained(cluster_of: Any, tmp_path: Any) -> None:
    words = "LlamaForCausalLM at tp_size=2", "input_layernorm.weight (by ", "hf-helix check", "adding_a_model.md"
    job = {"folder": str(tmp_path), "cache": str(tmp_path / "cache")}
    cluster_of(2).assert_raises(train_mistaken, *words, alike=True, **job)


@pytest.mark.slow
def test_what_was_changed_on_an_instance_is_proven(cluster_of: Any, tmp_path: Path) -> None:
    """A rank computes with a part of the tokens, where the patch would need to know all."""
    model = {"family": "support.derived_models:by_length", "num_hidden_layers": 2}
    said = "Gemma2ForCausalLM at tp_size=2 is derived from the model and does not compute"
    job = {"folder": str(tmp_path), "cache": str(tmp_path / "cache"), "model": model}
    cluster_of(2).assert_raises(train, said, alike=True, **job)


# In the processes of a cluster


class Derived(Llama):
    """Llama, as if it were derived from the model."""

    needs_proof = True

    def digest(self, model: Any) -> str:
        return "graphs of Llama"


class Mistaken(Derived, WithoutSum):
    """Whose gradients of norms are too small."""


@contextlib.contextmanager
def llama_is(family: Family, cache: str) -> Iterator[None]:
    """Another family for Llama, and another cache, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIX_CACHE", cache)
        patch.setitem(registry.REGISTERED, "LlamaForCausalLM", family)
        yield


def run_three_times(folder: str, cache: str) -> list[dict[str, Any]]:
    """What a declared family says and its losses with dropout, then those of one that needs a proof, twice."""
    runs = []
    for family in (Llama(), Derived(), Derived()):
        with llama_is(family, cache), contextlib.redirect_stdout(io.StringIO()) as said:
            torch.manual_seed(7)
            model, training = {"num_hidden_layers": 2, "attention_dropout": 0.2}, {"max_steps": 2}
            trainer: Any = make_trainer(folder, {"plan": "sequential", "tp_size": 2}, model, training=training)
            trainer.train()
        trainer.helix.close()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append({"said": said.getvalue(), "losses": losses, "next": torch.rand(1).item()})
    assert len({run["next"] for run in runs}) == 1
    return runs


def build_with_and_without(folder: str, cache: str) -> list[str]:
    """What is said at the start of a run without and with slices of the vocabulary on all ranks."""
    said = [io.StringIO(), io.StringIO()]
    for spread, output in enumerate(said):
        helix = {"plan": "sequential", "pp_size": 2, "spread_vocabulary": bool(spread)}
        with llama_is(Derived(), cache), contextlib.redirect_stdout(output):
            trainer: Any = make_trainer(folder, helix, {"num_hidden_layers": 4})
        trainer.helix.close()
    return [each.getvalue() for each in said]


def train_mistaken(folder: str, cache: str) -> None:
    with llama_is(Mistaken(), cache):
        make_trainer(folder, {"plan": "sequential", "tp_size": 2}, {"num_hidden_layers": 2})


def train(folder: str, cache: str, model: dict[str, Any]) -> None:
    """A trainer of a model as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIX_CACHE", cache)
        make_trainer(folder, {"plan": "sequential", "tp_size": 2}, model)
