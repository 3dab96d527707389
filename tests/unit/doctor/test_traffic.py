"""Sums of gradients on paper: what lasts longer than the backward beside which it begins."""

import ast
import contextlib
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.simulated import case_of, cluster_with, counted, layout_of_training, mesh_of_replicas, on_meta

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.amounts import META, SimulatedStreams
from hf_helix.doctor.amounts.meter import Meter, meta_as
from hf_helix.doctor.amounts.records import OTHER, Amounts, Kernel, Transfer
from hf_helix.doctor.estimate import estimate_profile
from hf_helix.doctor.step import layout_of
from hf_helix.doctor.traffic import layout_with_traffic, passes, timed_traffic
from hf_helix.engine.cut.build import cut_units
from hf_helix.planning import traffic
from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.gradients import reduce
from hf_helix.runtime.gradients.buckets import bound_buckets

CLUSTER = cluster_with(
    nodes=2, devices_per_node=2, node={"gb_per_s": 100}, network={"gb_per_s": 100, "devices_per_link": 1}
)
AMOUNTS = counted(on_meta(), bf16=True, tp_size=2)
CASE = case_of(tp=2, dp=2)
PROFILE = estimate_profile(AMOUNTS, AMOUNTS.layout, CASE, CLUSTER)
HELD = 4 * sum(AMOUNTS.weights[name].trained for name in AMOUNTS.layout.units)


class Streams(SimulatedStreams):
    """Run everything when it is issued, a window included."""

    def __init__(self) -> None:
        super().__init__([])
        self.late = []

    def window(self) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"shard_parameters": True}], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_reduction_moves_what_the_runtime_moves(
    ranks: int, options: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime's own reducer on the meta device, metered; on a GPU NCCL averages by itself."""
    meter = Meter()

    def copied(places: Any, values: Any) -> None:  # which the meter does not see
        meter.note(Kernel(OTHER, 0.0, 2 * sum(each.nbytes for each in places)))

    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    monkeypatch.setattr(reduce, "all_reduce", lambda *_: None)
    if backend == "nccl":
        monkeypatch.setattr(reduce, "_sum", lambda *_: None)
    log: list[Transfer] = []
    mesh = mesh_of_replicas(ranks, HelixConfig(**options), sums_in_place=backend == "nccl", log=log)
    model = on_meta(hidden_size=256, num_hidden_layers=3)
    units = cut_units(model, HelixConfig(**options), mesh, ["none"] * 3).rank_units
    for flat in units.flat_parameters:
        flat.shard_in_place(META)
    for parameter in units.own_rows:
        parameter.grad = torch.empty(parameter.shape, device=META)
    held = sum(parameter.grad.nbytes for parameter in units.own_rows if parameter.grad is not None)
    with meta_as(backend), meter:
        meter.begin("sums")
        reduce.GradientReducer(bound_buckets(units.rows, units.units, mesh.place), mesh, Streams()).finish()
    moved = sum(kernel.bytes for kernel in meter.counted["sums"].kernels)
    assert moved / held == pytest.approx(passes(ranks, bool(options), backend == "nccl"), rel=0.01)


def seconds_of(held: int) -> float:
    """Over two ranks each sends what it holds once; before, the gradients are put in one piece."""
    return held / 100e9 + 2 * held / 1000e9


@functools.cache
def three_layers(given: str) -> tuple[Any, Amounts]:
    """A model of these options, and what a rank does for it; for buckets of any size."""
    options, tp = ast.literal_eval(given)
    model = on_meta(**options, num_hidden_layers=3)
    return model, counted(model, tp_size=tp)


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 25 * 2**20])
@pytest.mark.parametrize(
    ("options", "tp"), [({}, 1), ({}, 2), ({"tie_word_embeddings": True}, 1), ({"model_type": "qwen3"}, 2)], ids=str
)
def test_sums_are_those_of_training(
    bucket_bytes: int, options: dict[str, Any], tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same gradients in the same sums, completed by the same operators, in the same order."""
    monkeypatch.setattr(traffic, "BUCKET_BYTES", bucket_bytes)
    model, amounts = three_layers(repr((options, tp)))
    case = case_of(tp=tp, dp=2)
    result = layout_with_traffic(layout_of(amounts, case), amounts, case).traffic
    assert result == layout_of_training(model, tp_size=tp).traffic
    assert (len(result) > 1) == (bucket_bytes < 2**20)


def test_a_profile_has_sums_only_where_other_ranks_see_other_tokens() -> None:
    result = timed_traffic(PROFILE, AMOUNTS, CASE, CLUSTER)
    (made,) = result.layout.reductions
    assert made.bytes == HELD
    assert result.times["gradients", "B.sum.0"] == pytest.approx(seconds_of(HELD))
    assert timed_traffic(PROFILE, AMOUNTS, case_of(tp=2), CLUSTER) is PROFILE
    # Both take twice as long beside each other; over different links neither does.
    name = ("gradients", "B.sum.0")
    collective = next(name for name in PROFILE.times if PROFILE.kind(name) is Kind.INTRA_NODE)
    node = replace(CLUSTER, nodes=1, devices_per_node=4)
    shared, apart = (timed_traffic(PROFILE, AMOUNTS, CASE, cluster) for cluster in (node, CLUSTER))
    for first, second in ((name, collective), (collective, name)):
        assert shared.slowdown(first, second) == pytest.approx(2.0)
        assert apart.slowdown(first, second) == 1.0
    # Sums to parts send half.
    amounts = counted(on_meta(), tp_size=2)  # in fp32 all of a unit is in one flat
    whole = timed_traffic(PROFILE, amounts, CASE, CLUSTER)
    parts = timed_traffic(PROFILE, amounts, CASE.changed(shard_parameters=True), CLUSTER)
    assert (
        sum(made.bytes for made in parts.layout.reductions)
        == sum(made.bytes for made in whole.layout.reductions)
        == HELD
    )
    seconds = {name: each for name, each in parts.times.items() if name[0] == "gradients"}
    assert len(seconds) == len(amounts.layout.units)
    assert sum(seconds.values()) == pytest.approx(HELD / 2 / 100e9 + 4 * HELD / 1000e9)


@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": True}, {"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2}],
    ids=str,
)
@pytest.mark.parametrize("when", ["window", "microbatch"])
def test_sums_to_parts_are_those_of_training(when: str, options: dict[str, Any]) -> None:
    """The gradients of a unit are one sum, those of its experts another; a tied table has one for all micro-batches."""
    model = on_meta(**options, num_hidden_layers=3)
    amounts = counted(model, shard_parameters=True, dp_size=2)
    case = case_of(dp=2, shard_parameters=True, reduce_gradients=when)
    training = layout_of_training(model, shard_parameters=True, reduce_gradients=when).traffic
    assert layout_with_traffic(layout_of(amounts, case), amounts, case).traffic == training
    assert [made.every_microbatch for made in training].count(False) == (
        len(training) if when == "window" else "tie_word_embeddings" in options
    )
