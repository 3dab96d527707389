"""States of parameters without a dimension are spread, saved and loaded as those of others; counts of steps are not."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_helix.checkpoint.training_state import load_states, save_states
from hf_helix.config import HelixConfig
from hf_helix.engine.optimizer_shards import step_shards
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.param_shard import COPIED
from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.operators.zero.zero1 import Zero1FlatParameter
from hf_helix.runtime.distributed.mesh import mesh_of
from hf_helix.runtime.local_parameters import FlatShard, LocalParameter

SHAPES = {"first": (4, 3), "gate": (), "last": (5,), "other gate": ()}


class Stepped:
    """Parameters, what steps them, and where that lies.

    Args:
        kind: whether ranks have all of them (`whole`), or a part that is gathered every time (`spread`) or once
            (`kept`).
        optimizer: the class.
    """

    def __init__(self, kind: str, optimizer: Any) -> None:
        self.parameters = {name: nn.Parameter(value) for name, value in values(0).items()}
        self.flat: FlatParameter | None = None
        self.optimizer = optimizer(self.parameters.values(), lr=0.1)
        if kind == "whole":
            self.local = {p: LocalParameter(name, COPIED, Axis.single()) for name, p in self.parameters.items()}
            return
        axes = mesh_of(HelixConfig(shard_optimizer=True), "cpu").replica_axes
        assert axes is not None
        make = Zero1FlatParameter if kind == "kept" else FlatParameter
        flat = self.flat = make("w", dict.fromkeys(self.parameters.values(), COPIED), axes.gather, axes.reduce)
        flat.shard_in_place(torch.device("cpu"))
        rank_units = SimpleNamespace(flat_parameters=[flat], shards=flat.shards, host_shards=[])
        rank_units.mark_weights_stale = flat.mark_stale
        step_shards(self.optimizer, rank_units, None)  # type: ignore[arg-type]
        self.local = {}
        for name, parameter in self.parameters.items():
            shard = FlatShard(tuple(parameter.shape), flat.owned_range(parameter)[0], flat.gather_axis, True)
            self.local[flat.shards[parameter]] = LocalParameter(name, COPIED, Axis.single(), shard)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """A step of the optimizer."""
        for name, parameter in self.parameters.items():
            if self.flat is None:
                parameter.grad = gradients[name].clone()
            else:
                self.flat.shards[parameter].grad = self.flat.owned_part(gradients[name], parameter)
        self.optimizer.step()

    def whole(self) -> dict[str, Tensor]:
        """The parameters."""
        if self.flat is not None:
            self.flat.unshard(self.flat.gather())
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def values(seed: int) -> dict[str, Tensor]:
    """Something of the shapes of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def change(folder: str, before: str, after: str, optimizer: str) -> float:
    """A step, saved; loaded by others who take the second: by how much they differ from who took both."""
    kind = getattr(torch.optim, optimizer)
    alone, first, second = Stepped("whole", kind), Stepped(before, kind), Stepped(after, kind)
    for stepped in (alone, first):
        stepped.step(values(1))
    save_states(first.optimizer, first.local, Path(folder))
    load_states(second.optimizer, second.local, Path(folder))
    start = first.whole()
    with torch.no_grad():
        for name, parameter in second.parameters.items():
            if second.flat is None:
                parameter.copy_(start[name])
            else:
                second.flat.shards[parameter].copy_(second.flat.owned_part(start[name], parameter))
    for stepped in (alone, second):
        stepped.step(values(2))
    expected, result = alone.whole(), second.whole()
    assert all(result[name].shape == value.shape for name, value in expected.items())
    return max(float((result[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ("whole", "kept", "NAdam"),
        ("kept", "whole", "AdamW"),
        ("kept", "spread", "Adagrad"),
        ("spread", "whole", "NAdam"),
    ],
)
def test_states_go_on(before: str, after: str, optimizer: str, cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "before": before, "after": after, "optimizer": optimizer}
    assert max(cluster_of(2).run(change, **job)) <= 1e-6
