"""How often the host waits for the device in a window of experts: counted on CPU by what is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_helix.adapters import family_of
from hf_helix.adapters.builder import Sharing
from hf_helix.adapters.sequence import SequenceCut
from hf_helix.checkpoint import cut_parameters
from hf_helix.operators.base import Call
from hf_helix.operators.experts import Announce, Exchange
from hf_helix.operators.tally import Tally
from hf_helix.operators.transport import Axis, SilentTransport
from hf_helix.planning.graph import Part
from hf_helix.planning.profile import rough_profile
from hf_helix.planning.rules import make_plan
from hf_helix.planning.scheduler import Scheduler
from hf_helix.recompute import recompute_units
from hf_helix.runtime.mesh import Mesh, Pipe
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.stage import place_units
from hf_helix.runtime.strand import MicroBatch
from hf_helix.runtime.streams import make_streams
from tests.support.models import mixtral

LAYERS, MICRO_BATCHES = 2, 2


class Waits(TorchDispatchMode):
    """Operators by which a value on a GPU would be read."""

    NAMES = ("_local_scalar_dense", "nonzero", "bincount", "unique_dim", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.NAMES:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all tensors that become lists."""
    found: list[tuple[int, ...]] = []
    tolist = Tensor.tolist

    def noted(value: Tensor) -> Any:
        found.append(tuple(value.shape))
        return tolist(value)

    monkeypatch.setattr(Tensor, "tolist", noted)
    return found


def runner_of(ep_size: int, capacity: float | None, recomputed: bool) -> tuple[Runner, list[MicroBatch]]:
    model = mixtral(num_hidden_layers=LAYERS).train()
    family = family_of(model)
    axis = Axis(SilentTransport(ep_size, 0))
    sharing = Sharing(experts=axis, capacity_factor=capacity)
    units = family.units(model, sharing)
    if recomputed:
        units = recompute_units(units, ["full"] * LAYERS)
    stage = place_units(units)
    sizes = {"dp": ep_size, "pp": 1, "cp": 1, "tp": 1, "ep": ep_size}
    mesh = Mesh(sizes, torch.device("cpu"), None, Axis.single(), Axis.single(), axis, Pipe([0]), None, None, None, None)
    cut_parameters(stage, mesh)
    plan = make_plan("greedy", rough_profile(stage.layout), model="MixtralForCausalLM", mesh={"tp_size": 1})
    runner = Runner(stage, plan, mesh, make_streams(mesh.device), Scheduler("w", 1), seed=0)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))

    def side() -> Any:
        return family.side_inputs(model, {"input_ids": ids, "labels": ids}, SequenceCut(), torch.tensor(1.0))

    return runner, [MicroBatch(side, (0, place)) for place in range(MICRO_BATCHES)]


@pytest.mark.parametrize(
    ("ep_size", "capacity", "recomputed", "reads"),
    [(2, None, False, 1), (2, None, True, 1), (1, None, False, 1), (2, 1.5, False, 0)],
    ids=["ep", "recomputed", "one rank", "capacity"],
)
def test_a_layer_reads_its_counts_once(
    ep_size: int, capacity: float | None, recomputed: bool, reads: int, read: list[tuple[int, ...]]
) -> None:
    runner, window = runner_of(ep_size, capacity, recomputed)
    with Waits() as waits:
        runner.train_window(window)
    assert waits.found == []
    assert len(read) == reads * LAYERS * MICRO_BATCHES


def test_the_numbers_serve_both_ways_and_backward(read: list[tuple[int, ...]]) -> None:
    """What this rank gives and gets, by rank; recompute announces again and reads nothing."""
    axis, tally = Axis(SilentTransport(2, 0)), Tally()
    announce, there, back = Announce(axis, tally), Exchange(axis, tally=tally), Exchange(axis, back=True, tally=tally)
    shared: dict[object, Any] = {}
    counts = torch.tensor([1, 0, 2, 3])
    rows = torch.randn(6, 4)
    call = Call({}, 0, True, shared=shared)
    (arriving,) = announce.forward(call, counts)
    (gone,) = there.forward(Call({}, 0, True, shared=shared), rows, counts, arriving)
    assert len(gone) == 6
    announce.again(call, counts)
    for exchange in (there, back):
        (outputs, _) = exchange.prepare(Call({}, 0, True, shared=shared), Part.B, rows, counts, arriving)
        assert outputs[0].shape == (6, 4)
    assert read == [(2, 2, 2)]
    assert tally.by_expert(call, torch.tensor([3, 3])) == [3, 3]
    assert len(read) == 1
