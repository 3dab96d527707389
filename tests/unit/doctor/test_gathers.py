"""Gathers of weights on paper (`shard_optimizer`): those of training, in the window as the runtime has them."""

import functools
from dataclasses import replace
from typing import Any

import pytest
from support.arrays import arrays_of
from support.simulated import case_of, cluster_with, counted, layout_of_training, on_meta

from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.estimate import rings
from hf_helix.doctor.step import layout_of, profile_of, simulate_step
from hf_helix.doctor.traffic import (
    cast_seconds,
    gather_seconds,
    kept_weights,
    layout_with_traffic,
    weight_gathers,
)
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.program import build_program
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.operator_clock import simulate
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.planning.window.layout import named_operators

CLUSTER = cluster_with(
    nodes=2,
    devices_per_node=1,
    network={"gb_per_s": 2, "latency_us": 5},
    contention={"compute_beside_inter_node": 1.1, "inter_node_beside_compute": 1.1},
)
SIZES = Sizes(dp=2)
SHARDED = case_of(dp=2, shard_optimizer=True)
PHIMOE = {"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2}


@functools.cache
def of_llama(bf16: bool = False, **options: Any) -> Amounts:
    """What a rank does, counted once for all tests."""
    return counted(on_meta(**options), bf16=bf16)


@pytest.mark.parametrize(
    ("options", "tp", "bf16"),
    [({}, 1, False), ({}, 2, True), ({"tie_word_embeddings": True}, 1, True), (PHIMOE, 1, True)],
    ids=str,
)
def test_gathers_and_sums_are_those_of_training(options: dict[str, Any], tp: int, bf16: bool) -> None:
    """The same weights in the same pieces, in the same order; of experts and of what stays in fp32 others."""
    model = on_meta(**options, num_hidden_layers=3)
    amounts = counted(model, bf16=bf16, tp_size=tp)
    for how in ({"shard_optimizer": True}, {"offload": "optimizer"}):
        training, case = layout_of_training(model, bf16, tp_size=tp, **how), case_of(tp=tp, dp=2, **how)
        layout = layout_of(amounts, case)
        assert layout_with_traffic(layout, amounts, case).traffic == training.traffic
        assert len(training.gathers) >= 5 * (1 + bf16) - 2 or "offload" in how


@pytest.mark.parametrize("options", [{}, {"shard_parameters": True}, {"tp_size": 2}], ids=str)
def test_streamed_weights_are_the_operators_of_training(options: dict[str, Any]) -> None:
    model, dp = on_meta(num_hidden_layers=3), {} if "tp_size" in options else {"dp_size": 2}
    training = layout_of_training(model, bf16=True, offload="parameters", **options)
    amounts = counted(model, bf16=True, offload="parameters", **dp, **options)
    assert amounts.layout.graphs == {name: training.graphs[name] for name in amounts.layout.units}
    assert not training.gathers
    assert not any(row.flat is not None and row.flat.is_kept for row in amounts.parameters)
    up = {name[1] for name, op in named_operators(amounts.layout) if op.kind is Kind.UP and name[0] == "layer"}
    gathered = ".up" if "shard_parameters" in options else ""
    assert up == {
        f"{turn}.weights{kind}{gathered}{again}"
        for turn, again in (("F", ""), ("B", ".again"))
        for kind in ("", ".products")
    }
    layer = amounts.weights["layer"].all_trained
    copied = sum(
        each.bytes
        for name in (f"F.weights{gathered}", f"F.weights.products{gathered}")
        for each in amounts.operators["layer", name].transfers
    )
    assert copied == pytest.approx(2 * layer / (2 if gathered else 1), rel=0.02)  # norms in fp32, and padding


@pytest.mark.parametrize("microbatches", [1, 6])
@pytest.mark.parametrize("plan", ["sequential", "greedy"])
def test_a_simulated_window_is_the_program_that_the_runtime_runs(plan: str, microbatches: int) -> None:
    """With the same times the cost function says the same of it."""
    model = on_meta(num_hidden_layers=4)
    amounts = counted(model, batch=4, length=64, bf16=True)
    case = Case.of(SIZES, 4, 64, microbatches, plan=plan, shard_optimizer=True)
    step = simulate_step(amounts, case, CLUSTER)
    profile = replace(
        profile_of(amounts, case, CLUSTER, whole=True),
        layout=layout_of_training(model, bf16=True, shard_optimizer=True),
    )
    made = make_plan(plan, profile, model="m", mesh={"tp_size": 1})
    program = build_program(Scheduler("auto", 1)(microbatches), profile.layout, made, 0)
    timeline = simulate(arrays_of(list(program), profile.layout, profile.times), profile.slowdown)
    assert step.window + step.sums == pytest.approx(timeline.seconds, rel=1e-9)
    assert step.drawn is not None
    assert step.drawn[1].seconds == pytest.approx(timeline.seconds, rel=1e-9)
    gathers = [each.unit for each in profile.layout.gathers]
    assert [each.unit for each in step.drawn[0] if each.unit in gathers] == gathers
    assert step.waits > 0
    assert Kind.GRADIENTS not in step.exposed


def test_gathers_cast_and_send_parts() -> None:
    amounts = of_llama(bf16=True)
    units = amounts.layout.units
    seconds = {
        (tuple(units[unit] for unit in kept[0].readers), kept[0].name): gather_seconds(
            kept, rings(CLUSTER, SHARDED.sizes), SHARDED, CLUSTER
        )
        for kept in kept_weights(amounts, SHARDED)
    }
    table = 128 * 64
    assert seconds[("embedding",), "weights"] == pytest.approx(4 * table / 2 / 2e9 + 5e-6)
    casting = (4 + 2) * table / 2 / 1000e9
    assert seconds[("head",), "weights.products"] == pytest.approx(casting + 2 * table / 2 / 2e9 + 5e-6)
    # Without copies nothing is gathered.
    amounts = of_llama()
    alone = case_of(shard_optimizer=True)
    assert weight_gathers(amounts, layout_of(amounts, alone), alone) == []


@pytest.mark.parametrize(("tied", "gathered"), [(False, False), (False, True), (True, False), (True, True)])
def test_weights_are_cast_once_in_a_window(tied: bool, gathered: bool) -> None:
    """Read in fp32 and written in bf16, at 1000 GB/s; those that are gathered are cast before, not a tied head's."""
    model = on_meta(num_hidden_layers=3, tie_word_embeddings=tied)
    amounts, exact = (of_llama(bf16, num_hidden_layers=3, tie_word_embeddings=tied) for bf16 in (True, False))
    cluster = cluster_with()
    matrices = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
    head = model.lm_head.weight.numel()
    cast = (0 if gathered else matrices) + (head if tied or not gathered else 0)
    case = case_of(4, dp=2, shard_optimizer=gathered)
    layout = layout_of(amounts, case)
    assert cast_seconds(amounts, layout, case, cluster) == pytest.approx(6 * cast / 1e12)
    assert cast_seconds(exact, layout, case, cluster) == 0, "nothing is cast in fp32"
    if not gathered:
        for fidelity in Fidelity:
            step = simulate_step(amounts, case, cluster, fidelity)
            assert step.casts == pytest.approx(6 * cast / 1e12)
            assert step.window > step.casts
