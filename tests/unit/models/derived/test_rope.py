"""Ropes in a trace: which calls are one operator, and that its bits are those of the model's own function."""

import copy

import pytest
import torch
from support.models import tiny
from support.small_modules import HEAD_DIM, Rotated
from support.small_traces import check_on_two_ranks, gradients_cut, inferred, traced
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3 import modeling_qwen3

from hf_helix.models.placement.value_placement import name_of
from hf_helix.models.trace import opaque_calls
from hf_helix.models.trace.opaque_calls import OpaqueCalls
from hf_helix.models.trace.trace import Given, ModuleTrace

EXAMPLES = [Given(name, (2, 6, HEAD_DIM), torch.float32, (0, 1)) for name in ("cos", "sin")]


def ropes_in(graph: ModuleTrace) -> list[str]:
    return [name_of(node) for node in graph.nodes if name_of(node) in ("rope", "neg")]


def cosines() -> dict[str, Tensor]:
    """Cosines and sines that differ from sequence to sequence."""
    angles = torch.randn(2, 6, HEAD_DIM // 2, generator=torch.Generator().manual_seed(5)).repeat(1, 1, 2)
    return {"cos": angles.cos(), "sin": angles.sin()}


class Interleaved(Rotated):
    """A function of the same name and other code."""

    def changed(self, q: Tensor, k: Tensor, v: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *modeling_cohere.apply_rotary_pos_emb(q, k, *rope), v


class TokensFirst(Rotated):
    """The function of Llama, called with heads behind the tokens."""

    def changed(self, q: Tensor, k: Tensor, v: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rope, unsqueeze_dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v


class Learned(Rotated):
    """Angles that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.zeros(HEAD_DIM))

    def changed(self, q: Tensor, k: Tensor, v: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = (value * self.angles for value in rope)
        return *apply_rotary_pos_emb(q, k, cos, sin), v


def test_a_call_is_one_operator_whose_queries_and_keys_keep_their_shares() -> None:
    result = inferred(Rotated(), EXAMPLES)
    (node,) = [node for node in result.trace.nodes if name_of(node) == "rope"]
    parts = [result.of(user) for user in node.users]
    assert [(placed.where, placed.dim, placed.blocks) for placed in parts] == [("full", 1, (4,)), ("full", 1, (2,))]
    assert ropes_in(result.trace) == ["rope"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Rotated(), ["rope"]),
        (Learned(), ["rope"]),
        (Interleaved(), ["neg", "neg"]),
        (TokensFirst(), ["neg", "neg"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_calls_are_one_operator(module: nn.Module, expected: list[str]) -> None:
    assert ropes_in(traced(module, EXAMPLES)) == expected
    check_on_two_ranks(module, **cosines())


def test_copies_in_other_files_count() -> None:
    model = tiny("qwen3")
    assert [space["__name__"] for space, _ in opaque_calls.ropes_of(model)] == [modeling_qwen3.__name__]


def test_the_functions_are_put_back() -> None:
    before = vars(modeling_qwen3)["apply_rotary_pos_emb"]
    seen = []

    def fail() -> None:
        with OpaqueCalls().capturing(tiny("qwen3")):
            seen.append(vars(modeling_qwen3)["apply_rotary_pos_emb"])
            raise RuntimeError("as it is")

    with pytest.raises(RuntimeError, match="as it is"):
        fail()
    assert seen != [before]
    assert vars(modeling_qwen3)["apply_rotary_pos_emb"] is before


def test_the_bits_are_those_of_the_traced_code(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator().manual_seed(4)
    module, (x, gradient) = Rotated(), torch.randn(2, 2, 6, 8, generator=dice)
    result = gradients_cut(module, x, gradient, **cosines())
    monkeypatch.setattr(opaque_calls, "same_code", lambda one, other: False)
    other = copy.deepcopy(module)
    assert ropes_in(traced(other, EXAMPLES)) == ["neg", "neg"]
    expected = gradients_cut(other, x, gradient, **cosines())
    assert all(torch.equal(result[name], value) for name, value in expected.items())
