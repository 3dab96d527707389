"""Rewrites of a trace: what is gone, and that the same is computed."""

from collections.abc import Callable

import pytest
import torch
from support.small_modules import Through
from support.small_traces import WIDTH, check_on_two_ranks, traced
from torch import Tensor

from hf_helix.models.placement.value_placement import name_of
from hf_helix.models.trace.trace import ModuleTrace, Underivable

Function = Callable[[Tensor], Tensor]


def between(graph: ModuleTrace) -> list[str]:
    """The operations between both linears."""
    names = [name_of(node) for node in graph.nodes if name_of(node) != "sym_size"]
    return names[names.index("linear") + 1 : len(names) - 1 - names[::-1].index("linear")]


def takes_all(h: Tensor) -> Tensor:
    return h[:, :, :].contiguous() * 2.0


def in_place(h: Tensor) -> Tensor:
    h = h * 2.0
    before = h.sigmoid()
    h += 1.0
    h.mul_(3.0)
    return h + before


def part_in_place(h: Tensor) -> Tensor:
    """The tensor of which a part is shown is written, too."""
    h = h * 2.0
    h[..., :4].add_(1.0)
    return h


def of_part(h: Tensor) -> Tensor:
    """The part is read, and not the tensor."""
    part = (h * 2.0)[..., :6].add_(1.0)
    return torch.cat((part, part.sin()), -1)


def filled(h: Tensor) -> Tensor:
    """A new tensor, filled piece by piece."""
    heads = h.view(*h.shape[:2], 4, 3)
    made = heads.new_empty(*heads.shape[:3], 6)
    made[..., 2:] = torch.cat((heads, heads[..., :1]), -1).tanh()
    made[..., :2] = heads[..., 1:]
    return made.sum(-1, keepdim=True).expand(*heads.shape).reshape(*h.shape)


def half_filled(h: Tensor) -> Tensor:
    """A tensor that is not filled wholly is no concatenation."""
    made = h.new_empty(*h.shape)
    made.zero_()
    made[..., 4:] = h[..., 4:]
    return made + h


class Rows(Through):
    """A linear over tokens in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.function(self.up(x.view(-1, WIDTH)))
        return x + self.down(rows).view(*x.shape)


@pytest.mark.parametrize(
    ("kind", "function", "operations"),
    [
        (Through, takes_all, ["mul"]),
        (Through, in_place, ["mul", "sigmoid", "add", "mul", "add"]),
        (Rows, torch.relu, ["relu"]),
        (Through, of_part, None),
        (Through, filled, None),
    ],
)
def test_the_same_is_computed(kind: type[Through], function: Function, operations: list[str] | None) -> None:
    """Of some also by what is left. Pieces that fill a tensor become a concatenation."""
    left = [name for name in between(traced(kind(function))) if name not in ("view", "reshape")]
    assert not {"new_empty", "copy_"} & {*left}
    assert operations is None or left == operations
    check_on_two_ranks(kind(function))


def test_linears_read_what_views_show() -> None:
    graph = traced(Rows(torch.relu))
    (linear, _) = [node for node in graph.nodes if name_of(node) == "linear"]
    assert linear.args[0] is graph.hidden


@pytest.mark.parametrize(("function", "name"), [(part_in_place, "add_"), (half_filled, "copy_")])
def test_a_tensor_that_is_written_in_part_and_read_is_refused(function: Function, name: str) -> None:
    with pytest.raises(Underivable, match=rf"{name}.* in the layer writes over a part of a tensor"):
        traced(Through(function))
