"""What is measured on CUDA is in order: the profiler and the timing of plans, watched as in `test_cuda_streams`."""

from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.marks import slow
from support.windows_on_fakes import one_rank

from hf_helix.measure import machine, operators
from hf_helix.measure import overlap as measure
from hf_helix.measure.operators import Bench, measure_profile
from hf_helix.measure.overlap import measure_overlap
from hf_helix.planning.graph.operator import Kind, Part
from hf_helix.planning.window.layout import named_operators

TP = {"tp_size": 2, "model": {"num_hidden_layers": 1}}
CASES: dict[str, dict[str, Any]] = {
    "tp": TP,
    "gathers": {"dp": 2, "shard_optimizer": True, "model": {"num_hidden_layers": 1}},
    "tp cp": {"tp_size": 2, "cp_size": 2, "inter_node_axes": ("cp",)},
    "experts": {"family": "mixtral", "dp": 2, "ep_size": 2},
    "a pipeline": {"pp_size": 2, "model": {"num_hidden_layers": 4}},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks find the same; no GPU is there to be held."""
    for module in (machine, measure, operators):
        monkeypatch.setattr(module, "all_gather_object", lambda mine: [mine])
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)


@pytest.mark.parametrize("name", [slow(name, when=name not in ("tp", "gathers")) for name in CASES])
def test_the_profiler_and_the_timing_of_a_plan(name: str) -> None:
    cuda = FakeCuda()
    with one_rank(cuda, plan="sequential", **CASES[name]) as (runner, window):
        with cuda.watch():
            profile = measure_profile(runner, window, pairs=name != "gathers")
            result = measure_overlap({"sequential": runner}, window, repeats=1)
        kinds = {name: op.kind for name, op in named_operators(runner.layout)}
        units, gathers = runner.rank_units.all_units, [each.named_operators[0] for each in runner.layout.gathers]
        readers = [each.readers[0] for each in runner.layout.gathers]
        flats = [units[unit].flat_parameters[op.forward_name] for unit, (_, op) in zip(readers, gathers, strict=True)]
        names, pieces = [name for name, _ in gathers], [flat.buffer.nbytes for flat in flats]
    # Of every weight that is gathered from two ranks, each sends its half.
    assert [profile.bytes[name] for name in names] == [piece // 2 for piece in pieces]
    assert bool(names) == (name == "gathers")
    assert cuda.operators > 1000
    assert not cuda.mistakes, "\n".join(map(str, cuda.mistakes[:10]))
    assert not [pair for pair in profile.pairs if all(kinds[each] is Kind.COMPUTE for each in pair)]
    assert profile.pairs or name in ("a pipeline", "gathers")
    assert result["sequential"].step > 0


def test_two_computations_at_once_would_be_out_of_order() -> None:
    """Which is why the profiler measures none beside each other there."""
    cuda = FakeCuda()
    with one_rank(cuda, plan="sequential", **TP) as (runner, window), cuda.watch():
        bench = Bench(runner, window[0], operators.IN_A_ROW)
        timed = next(timed for timed in bench.computing if timed.op.part is Part.W and bench.repeats(timed))
        assert not cuda.mistakes
        bench._on_two_streams(timed, timed)
    assert {"WRITE"} <= {mistake.kind for mistake in cuda.mistakes}
