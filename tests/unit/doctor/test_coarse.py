"""A search counts and predicts less: what it leaves out changes neither counts nor times."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
from support.simulated import LLAMA, case_of, cluster_with, counted, on_meta

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.coarse import coarse_amounts
from hf_helix.doctor.amounts.meter import Meter
from hf_helix.doctor.amounts.records import Amounts, Kernel
from hf_helix.doctor.counting import amounts_of
from hf_helix.doctor.step import simulate_step
from hf_helix.doctor.window import WRITTEN, Fidelity, long_window, schedule_of
from hf_helix.operators.vocabulary import head, statistics
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.window.layout import staged_layout

MODEL = on_meta(num_hidden_layers=8)
LENGTH = 2048
CLUSTER = cluster_with(devices_per_node=8)

LONG, SHORTER = 3 * WRITTEN, {1: WRITTEN, 2: WRITTEN, 4: WRITTEN}  # micro-batches; the latter by ranks


def kernels_of(amounts: Amounts, unit: str) -> Counter[Kernel]:
    """The kernels of a unit, with how often they run."""
    return Counter(chain.from_iterable(each.kernels for name, each in amounts.operators.items() if name[0] == unit))


@pytest.mark.parametrize(
    "options", [{}, {"tp_size": 2}, {"recompute": "selective"}, {"recompute": "full", "cp_size": 2}]
)
def test_coarse_operators_have_the_work_of_all(options: dict[str, object]) -> None:
    fine = counted(MODEL, 1, LENGTH, bf16=True, **options)
    coarse = coarse_amounts(fine)
    assert sum(each.calls for each in coarse.operators.values()) == len(fine.operators) > len(coarse.operators)
    for unit in fine.weights:
        assert kernels_of(coarse, unit) == kernels_of(fine, unit)
        deltas = [
            sum(each.delta for name, each in made.operators.items() if name[0] == unit) for made in (fine, coarse)
        ]
        assert deltas[0] == deltas[1]
    sent = [[each.transfers for each in made.operators.values() if each.transfers] for made in (fine, coarse)]
    assert sent[0] == sent[1]
    names = coarse.layout.units
    for row, of_all in zip(coarse.parameters, fine.parameters, strict=True):
        assert (row.shape, row.units, row.trained) == (of_all.shape, of_all.units, of_all.trained)
        assert all((names[unit], f"B.{op}") in coarse.operators for unit, op in row.adders)
        assert len(row.adders) > 0


def test_a_layer_without_communication_has_three_coarse_operators() -> None:
    coarse = coarse_amounts(counted(MODEL, 1, LENGTH, bf16=True))
    assert [entry for unit, entry in coarse.operators if unit == "layer"] == ["F.mlp.add", "B.mlp.add.I", "B.mlp.add.W"]


@pytest.mark.parametrize("schedule", ["folded_1f1b", "dualpipe_v"])
@pytest.mark.parametrize("pp", [2, 4])
def test_windows_take_as_long_by_coarse_amounts(pp: int, schedule: str) -> None:
    case = case_of(32, 1, LENGTH, pp=pp, dp=2, plan="greedy", schedule=schedule, shard_optimizer=True)
    fine = counted(MODEL, 1, LENGTH, bf16=True)
    exact = simulate_step(fine, case, CLUSTER, Fidelity.TIMED)
    step = simulate_step(fine, case, CLUSTER, Fidelity.TIMED, coarse_amounts(fine))
    assert step.window == pytest.approx(exact.window, rel=5e-3)
    assert step.memory.total == pytest.approx(exact.memory.total, rel=1e-2)
    assert step.loads == pytest.approx(exact.loads)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("tokens", [LENGTH // 4, 2 * LENGTH])
def test_equal_tiles_are_counted_once(tokens: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of the tokens, or of the rows, or of both."""
    monkeypatch.setattr(head, "WHOLE", 1)
    monkeypatch.setattr(head, "TOKENS", tokens)
    monkeypatch.setattr(head, "ROWS", LLAMA["vocab_size"] // 6)
    monkeypatch.setitem(statistics.CHUNK, "cuda", 2**14)
    monkeypatch.setitem(statistics.CHUNK, "cpu", 2**14)
    few = amounts_of(MODEL, HelixConfig(), 2, LENGTH, backend=backend)
    ran: list[int] = []

    def every(meter: Meter, parts: Sequence[slice], settled: int) -> Iterator[slice]:
        ran.append(len(parts))
        yield from parts

    monkeypatch.setattr(Meter, "few_parts", every)
    all_parts = amounts_of(MODEL, HelixConfig(), 2, LENGTH, backend=backend)
    assert max(ran) > 4
    assert kernels_of(few, "head") == kernels_of(all_parts, "head")
    for name, each in all_parts.operators.items():
        assert few.operators[name].delta == each.delta
        assert few.operators[name].peak == pytest.approx(each.peak, rel=1e-2)


def test_long_windows_are_extrapolated_as_predicted() -> None:
    amounts = counted(MODEL, 1, LENGTH)
    for ranks, name in ((1, "folded_1f1b"), (2, "dualpipe_v"), (4, "folded_1f1b")):
        case = case_of(8, 1, LENGTH, pp=ranks)
        layers = [range(8 * stage // (2 * ranks), 8 * (stage + 1) // (2 * ranks)) for stage in range(2 * ranks)]
        layout = staged_layout(amounts.model.units, amounts.layout.graphs, case.stage_ranks, layers)
        profile = rough_profile(layout)
        plan = make_plan("greedy", profile, model="model", mesh={})
        windows = {count: predict(plan, profile, schedule_of(name, ranks, count)) for count in (LONG, SHORTER[ranks])}
        found = long_window(windows.__getitem__, LONG, ranks)
        assert found.seconds == pytest.approx(windows[LONG].seconds, rel=1e-3)
