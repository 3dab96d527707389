"""Tuning in proportion to the run: budgets, estimates and the time of a step, under a clock that stands still."""

import dataclasses

import pytest
from support.graphs import layers_only, llama_layer

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.tuning.budget import FULL, QUICK, SHORT, TIERS, StepTimer, Tier, affordable, tuning_cost


def timer_of(step_time: float) -> StepTimer:
    result = StepTimer()
    result.step_time = step_time
    return result


def test_the_budget_is_a_share_of_what_is_left() -> None:
    timer = timer_of(0.5)
    assert timer.budget(steps_left=1000, share=0.05) == pytest.approx(25.0)
    assert timer.budget(steps_left=1000, share=0.0) == 0.0
    timer.seconds_paused = 0.2
    assert timer.budget(steps_left=1, share=1.0) == pytest.approx(0.3)


LAYOUT = layers_only(GraphPair.of(llama_layer()), 4)
COSTS = {QUICK: 5.0, SHORT: 15.0, FULL: 40.0}


@pytest.mark.parametrize(
    ("budget", "done", "tier"),
    [
        (4.9, "", None),
        (5.0, "", QUICK),
        (39.0, "", SHORT),
        (40.0, "", FULL),
        (14.0, "quick", None),  # no more than what was done already
        (16.0, "quick", SHORT),
        (1e9, "short", FULL),
        (1e9, "full", None),
    ],
)
def test_the_most_thorough_tier_that_fits(budget: float, done: str, tier: Tier | None) -> None:
    assert affordable(budget, COSTS.__getitem__, done) == tier


def test_the_estimate_grows_with_tier_window_and_choices() -> None:
    costs = [tuning_cost(tier, LAYOUT, 0.1, 400) for tier in TIERS]
    assert costs == sorted(costs)
    assert costs[2] > 3 * costs[0]
    assert tuning_cost(FULL, LAYOUT, 0.2, 400) > costs[2]
    assert tuning_cost(FULL, LAYOUT, 0.1, 400, schedules=3) > costs[2]
    assert tuning_cost(FULL, LAYOUT, 0.1, 400, profiled=False) < costs[2]
    one = dataclasses.replace(FULL, rules=("greedy",))
    assert tuning_cost(one, LAYOUT, 0.1, 400, profiled=False) == pytest.approx(0.1 * (2 * 3 + 1))


@pytest.mark.parametrize("seconds", [1e-3, 10.0])
def test_a_run_of_a_few_steps_is_never_worth_it(seconds: float) -> None:
    """By default, at any speed: 5 % of a hundred windows is less than the least tuning takes."""
    timer = timer_of(seconds)
    tiers = [
        affordable(timer.budget(steps, 0.05), lambda tier: tuning_cost(tier, LAYOUT, seconds, 400))
        for steps in (100, 10**6)
    ]
    assert tiers == [None, FULL]


@pytest.mark.parametrize("uncounted", [1, 2])
def test_the_clock_is_read_ever_more_rarely(uncounted: int) -> None:
    """The first step (with CUDA graphs, two) takes 100 s and is not counted, the others 2 s, from the eighth on 3 s;
    nor do pauses count."""
    now = 0.0
    timer = StepTimer(clock=lambda: now, uncounted=uncounted)
    result: dict[int, float] = {}
    waits: list[int] = []
    for step in range(20):
        if timer.begin_step(lambda: waits.append(timer.steps_done)):
            result[step] = timer.step_time
        if step in (2, 5):
            with timer.paused():
                now += 1000.0
        now += 100.0 if step < uncounted else 2.0 if step < 8 else 3.0
    assert result == {step: 3.0 if step == 16 else 2.0 for step in (2, 4, 8, 16)[uncounted - 1 :]}
    assert waits == [1, 2, 4, 8, 16][uncounted - 1 :], "the device is waited for only when the clock is read"
    assert timer.steps_done == 19
    assert timer.seconds_paused == 2000.0
