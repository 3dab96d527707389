"""What a profile says of other links: the emulation's own rule, backwards and forwards."""

import dataclasses

import pytest
from support.profiles import ABOUT, GATHER, MODEL, UP, tiny_profile

from hf_helix.config import LinkSpeed
from hf_helix.planning.plan.link_speeds import NO_LINK, link_of, on_link, predict_speeds
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.profile_file import load_profile, save_profile
from hf_helix.planning.window.layout import named_operators

HERE = LinkSpeed(1e9, 0.5e-3)
BYTES = 312_500  # 2.5 ms at 1 Gbit/s, so with the latency the 3 ms of a collective
BARE = 1e-3  # seconds of one without the link


def measured() -> Profile:
    """As on an emulated link of 1 Gbit/s and half a millisecond."""
    profile = tiny_profile()
    moving = [name for name, op in named_operators(profile.layout) if op.kind.communicates]
    about = {**ABOUT, "emulated_link": HERE.text}
    return dataclasses.replace(
        profile, about=about, bytes=dict.fromkeys(moving, BYTES), bare=dict.fromkeys(moving, BARE)
    )


def test_a_collective_takes_what_the_link_needs_or_what_it_takes_without_one():
    profile = measured()
    assert link_of(profile) == HERE
    slow, late, fast, none = (
        on_link(profile, speed) for speed in (LinkSpeed(0.25e9), LinkSpeed(2.5e9, 1e-3), LinkSpeed(10e9), NO_LINK)
    )
    assert [round(result.times[GATHER] * 1e3, 6) for result in (slow, late, fast, none)] == [10.0, 2.0, 1.0, 1.0]
    assert slow.times[UP] == profile.times[UP]
    assert (link_of(slow), link_of(none)) == (LinkSpeed(0.25e9), NO_LINK)
    assert "emulated_link" not in none.about
    back = on_link(slow, HERE)
    assert back.times == pytest.approx(profile.times)
    assert back.slowdown(UP, GATHER) == pytest.approx(profile.slowdown(UP, GATHER))
    # What a collective costs computation does not depend on the link.
    lost = (profile.slowdown(UP, GATHER) - 1) * profile.times[GATHER]
    assert lost > 0
    for there in (slow, on_link(profile, LinkSpeed(2e9))):
        assert (there.slowdown(UP, GATHER) - 1) * there.times[GATHER] == pytest.approx(lost)


def test_plans_are_made_for_each_link_and_predicted_on_it():
    speeds = [LinkSpeed(0.25e9), HERE, LinkSpeed(8e9)]
    schedule = build_schedule("folded_1f1b", 1, 4)
    mesh = {"tp_size": 2, "pp_size": 1}
    plans = {rule: make_plan(rule, measured(), model=MODEL, mesh=mesh) for rule in ("sequential", "greedy")}
    result = predict_speeds(measured(), schedule, speeds, plans)
    assert [row.speed for row in result] == speeds
    assert len({row.computation for row in result}) == 1
    slow, here, fast = result
    assert slow.communication > here.communication > fast.communication
    assert slow.plans["sequential"] > here.plans["sequential"] > fast.plans["sequential"]
    for row in result:
        assert row.plans["sequential"] > row.plans["greedy"]
        assert row.plans["greedy"] >= max(row.computation, row.communication) - 1e-9
    # Where both take as long there is most to gain.
    assert here.plans["sequential"] / here.plans["greedy"] > fast.plans["sequential"] / fast.plans["greedy"]


def test_bytes_are_kept_in_the_file_and_a_profile_without_them_is_refused(tmp_path):
    profile = measured()
    save_profile(profile, tmp_path / "profile.json")
    kept = load_profile(tmp_path / "profile.json")
    assert (kept.bytes, kept.bare) == (profile.bytes, profile.bare)
    with pytest.raises(ValueError, match=r"does not say how many bytes .*measure anew with `hf-helix profile`"):
        on_link(tiny_profile(), HERE)
