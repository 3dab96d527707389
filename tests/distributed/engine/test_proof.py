"""A proof finds the mistakes that a declaration can have, and every family of the package passes it."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from support.marks import slow
from support.mistaken_families import WithoutSum
from support.models import made, tiny
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_helix import HelixConfig
from hf_helix.engine.proof.prove import prove
from hf_helix.models import registry
from hf_helix.models.derived.family import Family
from hf_helix.models.families.llama import Llama
from hf_helix.runtime.distributed.mesh import mesh_of


@pytest.mark.parametrize(
    ("name", "ranks", "helix"),
    [
        ("phimoe", 2, {"ep_size": 2}),
        slow("qwen2", 4, {"tp_size": 2, "pp_size": 2}),
    ],
    ids=str,
)
def test_families_are_equal(name: str, ranks: int, helix: dict[str, int], cluster_of: Any) -> None:
    """Data-parallel ranks have batches of their own."""
    model = {"family": name, "num_hidden_layers": 2 * helix.get("pp_size", 1)}
    first, *others = cluster_of(ranks).run(proof_of, model=model, helix=helix)
    assert others == [first] * (ranks - 1)
    assert first["verdict"] == "equal", first["lines"]
    assert first["undisturbed"]


@pytest.mark.parametrize("mistake", ["logits cap", "on_shard", "padding"])
def test_a_mistake_is_found(mistake: str, cluster_of: Any) -> None:
    ranks = cluster_of(2).run(proof_of_mistake, mistake=mistake)
    assert ranks[0] == ranks[1]
    wrong = ranks[0]
    assert wrong["verdict"] == "different", wrong["lines"]
    if mistake == "on_shard":  # which concerns these gradients only
        assert all("layernorm" in name for name in wrong["wrong"])
    if mistake == "logits cap":
        assert "logits" in wrong["wrong"]


def test_a_declaration_without_the_mistake_is_equal(cluster_of: Any) -> None:
    """Of Llama itself others prove it."""
    ranks = cluster_of(2).run(proof_of_mistake, mistake="logits cap", mistaken=False)
    assert ranks[0] == ranks[1]
    assert ranks[0]["verdict"] == "equal", ranks[0]["lines"]


def test_a_refusal_is_the_same_on_all_ranks(cluster_of: Any) -> None:
    ranks = cluster_of(2).run(proof_of, model={"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24})
    assert ranks[0] == ranks[1]
    assert ranks[0]["verdict"] == "refused"
    assert "must divide the model's 3 attention heads" in ranks[0]["text"]


def test_an_error_of_one_rank_is_a_refusal_on_all(cluster_of: Any) -> None:
    ranks = cluster_of(2).run(proof_that_fails_on_rank_1)
    assert ranks[0] == ranks[1]
    assert ranks[0]["text"].endswith("refused: KeyError: 'on this rank only'")


# In the processes of a cluster


def proof_of(model: Mapping[str, Any], helix: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The proof of a tiny model."""
    return proven(tiny(**model), helix or {"tp_size": 2})


def proven(model: Any, helix: Mapping[str, Any]) -> dict[str, Any]:
    """A proof as plain data, and whether the process is as it was."""
    config = HelixConfig(**helix)
    mesh = mesh_of(config, "cpu")
    before = {name: p.clone() for name, p in model.named_parameters()}
    state, threads = torch.get_rng_state(), set(threading.enumerate())
    proof = prove(model, config, mesh)
    same = all(p.equal(before[name]) for name, p in model.named_parameters())
    return {
        "verdict": proof.verdict,
        "text": str(proof).partition(" (")[0],
        "lines": proof.lines,
        "wrong": [difference.name for difference in proof.wrong],
        "undisturbed": same and state.equal(torch.get_rng_state()) and end_of(threads),
    }


def end_of(threads: set[threading.Thread]) -> bool:
    """Whether all but these end soon: those of streams end with what is left in their queues."""
    deadline = time.monotonic() + 10
    while not set(threading.enumerate()) <= threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return set(threading.enumerate()) <= threads


@contextlib.contextmanager
def family_is(family: Family) -> Iterator[None]:
    """Registers a family for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.REGISTERED, family.model_class, family)
        yield


def proof_of_mistake(mistake: str, mistaken: bool = True) -> dict[str, Any]:
    """The proof of a declaration with a mistake, or without it."""
    right, wrong, model = MISTAKES[mistake]
    with family_is(wrong() if mistaken else right()):
        return proven(model(), {"tp_size": 2})


def proof_that_fails_on_rank_1() -> dict[str, Any]:
    """The proof of a family whose declaration fails on one rank."""
    with family_is(Failing()):
        return proof_of({})


# Declarations with and without a mistake


class CappedForCausalLM(LlamaForCausalLM):
    """Llama with the soft cap of Gemma 2's logits, at its usual size."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        items = kwargs.pop("num_items_in_batch", None)
        result = super().forward(input_ids, **kwargs)
        result.logits = capped(result.logits)
        if labels is not None:
            result.loss = self.loss_function(result.logits, labels, self.config.vocab_size, num_items_in_batch=items)
        return result


def capped(logits: Tensor) -> Tensor:
    """The final cap of Gemma 2."""
    return 30.0 * torch.tanh(logits / 30.0)


class Capped(Llama):
    """A right declaration of `CappedForCausalLM`."""

    model_class = "CappedForCausalLM"

    def loss(self, b: Any, model: Any, x: str) -> str:
        h = b.all_gather("gather", b.norm("norm", self.final_norm(model), x))
        (h,) = b.column_parallel("out", {"raw": model.lm_head}, h)
        return b.loss("loss", b.autograd("cap", self.cap, h), model.lm_head.weight.shape[0])

    def cap(self, logits: Tensor) -> Tensor:
        return capped(logits)


class WithoutLogitsCap(Capped):
    def cap(self, logits: Tensor) -> Tensor:
        return logits.clone()


class WithoutPaddingOnTheRight(Llama):
    """Takes it for read by nobody."""

    def attention_inputs(self, model: Any, ids: Tensor, mask: Any, positions: Tensor, documents: Any) -> Any:
        mask = None if mask is not None and bool(mask[:, 0].all()) else mask
        return super().attention_inputs(model, ids, mask, positions, documents)


class Failing(Llama):
    def layer(self, b: Any, layer: Any) -> Any:
        if b.tp.rank == 1:
            raise KeyError("on this rank only")
        return super().layer(b, layer)


def capped_model() -> Any:
    return made(CappedForCausalLM, LlamaConfig, {"num_hidden_layers": 2})


MISTAKES: dict[str, Any] = {
    "logits cap": (Capped, WithoutLogitsCap, capped_model),
    "on_shard": (Llama, WithoutSum, lambda: tiny(num_hidden_layers=2)),
    "padding": (Llama, WithoutPaddingOnTheRight, lambda: tiny(num_hidden_layers=2)),
}
"""A right declaration, one with a mistake, and the model."""
