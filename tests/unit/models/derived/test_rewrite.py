"""Rewrites of a trace: what is gone, and that the same is computed."""

import pytest
import torch
from support.small_traces import WIDTH, check_on_two_ranks, traced
from torch import Tensor, nn

from hf_helix.models.placement.value_placement import name_of
from hf_helix.models.trace.trace import ModuleTrace, Underivable


class Code(nn.Module):
    """x + down(change(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def change(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.change(self.up(x)))


def between(graph: ModuleTrace) -> list[str]:
    """The operations between both linears."""
    names = [name_of(node) for node in graph.nodes if name_of(node) != "sym_size"]
    return names[names.index("linear") + 1 : len(names) - 1 - names[::-1].index("linear")]


class TakesAll(Code):
    def change(self, h: Tensor) -> Tensor:
        return h[:, :, :].contiguous() * 2.0


class InPlace(Code):
    def change(self, h: Tensor) -> Tensor:
        h = h * 2.0
        before = h.sigmoid()
        h += 1.0
        h.mul_(3.0)
        return h + before


class PartInPlace(Code):
    """The tensor of which a part is shown is written, too."""

    def change(self, h: Tensor) -> Tensor:
        h = h * 2.0
        h[..., :4].add_(1.0)
        return h


class OfPart(Code):
    """The part is read, and not the tensor."""

    def change(self, h: Tensor) -> Tensor:
        part = (h * 2.0)[..., :6].add_(1.0)
        return torch.cat((part, part.sin()), -1)


class Rows(Code):
    """A linear over tokens in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x.view(-1, WIDTH)).relu()
        return x + self.down(rows).view(*x.shape)


class Filled(Code):
    """A new tensor, filled piece by piece."""

    def change(self, h: Tensor) -> Tensor:
        heads = h.view(*h.shape[:2], 4, 3)
        made = heads.new_empty(*heads.shape[:3], 6)
        made[..., 2:] = torch.cat((heads, heads[..., :1]), -1).tanh()
        made[..., :2] = heads[..., 1:]
        return made.sum(-1, keepdim=True).expand(*heads.shape).reshape(*h.shape)


class HalfFilled(Code):
    """A tensor that is not filled wholly is no concatenation."""

    def change(self, h: Tensor) -> Tensor:
        made = h.new_empty(*h.shape)
        made.zero_()
        made[..., 4:] = h[..., 4:]
        return made + h


@pytest.mark.parametrize(
    ("kind", "operations"),
    [
        (TakesAll, ["mul"]),
        (InPlace, ["mul", "sigmoid", "add", "mul", "add"]),
        (Rows, ["relu"]),
        (OfPart, None),
        (Filled, None),
    ],
)
def test_the_same_is_computed(kind: type[nn.Module], operations: list[str] | None) -> None:
    """Of some also by what is left. Pieces that fill a tensor become a concatenation."""
    left = [name for name in between(traced(kind())) if name not in ("view", "reshape")]
    assert not {"new_empty", "copy_"} & {*left}
    assert operations is None or left == operations
    check_on_two_ranks(kind())


def test_linears_read_what_views_show() -> None:
    graph = traced(Rows())
    (linear, _) = [node for node in graph.nodes if name_of(node) == "linear"]
    assert linear.args[0] is graph.hidden


@pytest.mark.parametrize(("kind", "name"), [(PartInPlace, "add_"), (HalfFilled, "copy_")])
def test_a_tensor_that_is_written_in_part_and_read_is_refused(kind: type[nn.Module], name: str) -> None:
    with pytest.raises(Underivable, match=rf"{name}.* in the layer writes over a part of a tensor"):
        traced(kind())
