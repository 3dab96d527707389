"""Sums of gradients on paper: what lasts longer than the backward beside which it begins."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.on_paper import cluster_with, counted, on_meta

from hf_helix.simulation import sums
from hf_helix.simulation.estimate import Ring, estimate_profile
from hf_helix.simulation.sizes import Sizes
from hf_helix.simulation.sums import exposed_sums

CLUSTER = cluster_with(nodes=2, devices_per_node=2, node={"gb_per_s": 100}, network={"gb_per_s": 100})
AMOUNTS = counted(on_meta(), bf16=True, tp_size=2)
PROFILE = estimate_profile(AMOUNTS, AMOUNTS.layout, Sizes(tp=2, dp=2), CLUSTER)
HELD = 4 * sum(AMOUNTS.weights[name].trained for name in AMOUNTS.layout.units)
INSIDE, ACROSS, ALONE = Ring(2, 2, 1), Ring(2, 1, 1), Ring(1, 1, 1)


def exposed(copies: Ring) -> float:
    axes: Mapping[str, Ring] = {"tp": INSIDE, "cp": ALONE, "experts": ALONE, "copies": copies, "expert_copies": ALONE}
    return exposed_sums(AMOUNTS, AMOUNTS.layout, axes, CLUSTER, PROFILE)


def seconds_of(held: int) -> float:
    """Over two ranks each sends what it holds once; before, the gradients are put in one piece."""
    return held / 100e9 + 2 * held / 1000e9


def test_what_fits_in_one_bucket_is_summed_once_backward_is_over():
    assert exposed(ACROSS) == pytest.approx(seconds_of(HELD))
    assert exposed(ALONE) == 0.0


def test_full_buckets_are_summed_beside_backward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sums, "BUCKET_BYTES", HELD // 8)
    last = seconds_of(HELD % (HELD // 8) or HELD // 8)
    assert last <= exposed(ACROSS) < seconds_of(HELD)


def test_sums_wait_for_what_backward_sends_over_the_same_link(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sums, "BUCKET_BYTES", HELD // 8)
    assert exposed(INSIDE) > exposed(ACROSS)
