"""Simulated pipelines against formulas and an oracle of its own; the chosen schedule is never behind the named ones."""

import math
import random
from pathlib import Path

import pytest
from support.marks import slow
from support.schedules import slot_ends

from hf_helix.planning.choice import auto
from hf_helix.planning.choice.auto import SEARCHED, Policy, choose_schedule, list_schedule
from hf_helix.planning.choice.scheduler import Scheduler, simulate_layers
from hf_helix.planning.choice.slot_clock import Costs, Simulated, SlotClock, simulate_schedule
from hf_helix.planning.schedule.actions import Slot, format_schedule, parse_schedule
from hf_helix.planning.schedule.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import FOLD, stage_ranks
from hf_helix.planning.schedule.validate import validate

UNIT = {"forward": 1.0, "input": 1.0, "weight": 1.0}
SETS: dict[str, dict[str, float]] = {
    "no gain": UNIT,
    "the paper's gain": {**UNIT, "gain": 1.4},
    "slow backward": {"forward": 1.0, "input": 1.3, "weight": 0.9, "gain": 1.2},
    "recompute and links": {"forward": 1.0, "input": 2.0, "weight": 1.0, "gain": 1.3, "transfer": 0.2},
}
every_set = pytest.mark.parametrize("costs", SETS.values(), ids=SETS)


def even(num_stages: int, **options: float) -> Costs:
    return Costs.of_layers([1] * num_stages, **options)


def simulated(name: str, num_ranks: int, num_microbatches: int, **options: float) -> Simulated:
    ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
    return simulate_schedule(build_schedule(name, num_ranks, num_microbatches), ranks, even(len(ranks), **options))


# Costs


def test_what_things_take():
    costs = Costs((1.0, 2.0), (4.0, 8.0), (16.0, 32.0), gain=1.5)
    texts = {"0F0": 1, "1F3": 2, "1I0": 8, "1W0": 32, "1B0": 40, "(0F1;1B0)OVERLAP_F_B": 40, "(1F1;0I0)OVERLAP_F_B": 4}
    assert {text: costs.slot_seconds(Slot.parse(text)) for text in texts} == texts, "no faster than the longer alone"
    assert even(2, **UNIT, gain=1.5).slot_seconds(Slot.parse("(0F1;1B0)OVERLAP_F_B")) == 2
    assert Costs.of_layers([2, 3], 1, 10, 100, 7, 2) == Costs([2, 3], [20, 30], [200, 300], 7, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((1.0,), (1.0, 1.0), (1.0,)), "a number for each virtual stage"),
        (((-1.0,), (1.0,), (1.0,)), "at least 0"),
        (((1.0,), (math.inf,), (1.0,)), "at least 0"),
        (((0.0,), (1.0,), (1.0,)), "a forward that takes more"),
        (((1.0,), (1.0,), (1.0,), -0.1), "at least 0"),
        (((1.0,), (1.0,), (1.0,), 0.0, 0.0), "gain=0.0 must be more than 0"),
    ],
)
def test_costs_that_make_no_sense_are_refused(arguments: tuple[object, ...], said: str):
    with pytest.raises(ValueError, match=said):
        Costs(*arguments)


# Simulation


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(p, m) for p in range(1, 6) for m in (p, p + 1, 3 * p)])
def test_the_numbers_of_1f1b(num_ranks: int, num_microbatches: int):
    result = simulated("1f1b", num_ranks, num_microbatches, **UNIT, gain=1.4)
    units = num_microbatches + num_ranks - 1
    assert result.seconds == 3 * units
    assert result.bubble == pytest.approx((num_ranks - 1) / units)
    assert result.bubbles == pytest.approx([(num_ranks - 1) / units] * num_ranks)
    assert result.live == [num_ranks - rank for rank in range(num_ranks)]
    assert result.shares == pytest.approx(result.live)
    assert result.fused == [0] * num_ranks


def test_activations_are_weighed_by_the_forward_of_their_stage():
    costs = Costs((3.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    schedule = parse_schedule("0F0 1F0 1I0 0I0 0W0 1W0", 1)
    assert simulate_schedule(schedule, (0, 0), costs).shares == [1.0]
    schedule = parse_schedule("0F0 1F0 1I0 1W0 0I0 (0F1;0W0)OVERLAP_F_B 1F1 1B1 0B1", 1)
    result = simulate_schedule(schedule, (0, 0), costs)
    assert result.live == [2]
    assert result.shares == [1.5], "in a fused slot both live"


@pytest.mark.parametrize("seed", range(30))
def test_simulation_is_a_longest_path(seed: int):
    rng = random.Random(seed)
    name, num_ranks, count = rng.choice(list(PLACEMENT_OF)), rng.randint(1, 4), rng.randint(1, 9)
    ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
    times = [[rng.uniform(0.1, 3) for _ in ranks] for _ in range(3)]
    costs = Costs(*times, transfer=rng.uniform(0, 1), gain=rng.uniform(0.8, 1.8))
    schedule = build_schedule(name, num_ranks, count)
    result = simulate_schedule(schedule, ranks, costs)
    ends = slot_ends(schedule, len(ranks), count, costs.slot_seconds, costs.transfer)
    assert {(r, n): end for r, row in enumerate(result.ends) for n, end in enumerate(row)} == pytest.approx(ends)
    for rank, slots in enumerate(schedule):
        lengths = [end - start for start, end in zip(result.starts[rank], result.ends[rank], strict=True)]
        assert lengths == pytest.approx([costs.slot_seconds(slot) for slot in slots])
        assert sum(lengths) + result.bubbles[rank] * result.seconds == pytest.approx(result.seconds)


def test_what_cannot_end_is_refused():
    with pytest.raises(ValueError, match="cannot run to its end"):
        simulate_schedule(parse_schedule("1F0 0F0 1B0 0B0", 1), (0, 0), even(2))
    with pytest.raises(ValueError, match="of 4 virtual stages and the placement has 2"):
        simulate_schedule(parse_schedule("0F0 1F0 1B0 0B0", 1), (0, 0), even(4))


# List scheduling


@pytest.mark.parametrize("seed", range(40))
def test_no_policy_gets_stuck_or_takes_more_room(seed: int):
    rng = random.Random(seed)
    num_ranks, count = rng.randint(1, 5), rng.randint(1, 12)
    ranks = stage_ranks(FOLD, num_ranks)
    times = [[rng.choice([0.0, rng.uniform(0.1, 3)]) for _ in ranks] for _ in range(3)]
    times[0][0] += 0.1
    costs = Costs(*times, transfer=rng.choice([0.0, rng.uniform(0, 2)]), gain=rng.uniform(0.8, 1.8))
    policy = Policy(
        max_live=rng.randint(2, 2 * num_ranks + 3),
        pair=rng.choice([True, False]),
        early=rng.choice([True, False]),
        apart=rng.randint(0, 2 * count),
        forward=rng.randint(0, 2),
        backward=rng.randint(0, 2),
        delay=rng.choice([0.0, 0.5, 1.0]),
    )
    schedule, seconds = list_schedule(SlotClock(ranks, costs, count), policy)
    validate(schedule, count, ranks)
    result = simulate_schedule(schedule, ranks, costs)
    assert max(result.live) <= policy.max_live
    assert result.seconds <= seconds + 1e-9, "a rank may have waited for a partner that it did not take"


# The choice


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refinement of a few steps."""
    monkeypatch.setattr(auto, "TRIALS", 200)


def named(num_ranks: int, num_microbatches: int, costs: Costs) -> dict[str, Simulated]:
    ranks = stage_ranks(FOLD, num_ranks)
    names = [name for name, placement in PLACEMENT_OF.items() if placement == FOLD]
    return {name: simulate_schedule(build_schedule(name, num_ranks, num_microbatches), ranks, costs) for name in names}


def chosen(num_ranks: int, num_microbatches: int, costs: Costs) -> Simulated:
    ranks = stage_ranks(FOLD, num_ranks)
    label, schedule = choose_schedule(num_ranks, num_microbatches, costs)
    validate(schedule, num_microbatches, ranks)
    assert label in ("folded_1f1b", "dualpipe_v", SEARCHED)
    if label != SEARCHED:
        assert schedule == build_schedule(label, num_ranks, num_microbatches)
    return simulate_schedule(schedule, ranks, costs)


@pytest.mark.parametrize(
    ("costs", "num_ranks"),
    [
        (UNIT, 1),
        *((costs, 2) for costs in SETS.values()),
        slow(SETS["recompute and links"], 6),
    ],
)
def test_the_choice_is_never_behind_and_takes_no_more_room(costs: dict[str, float], num_ranks: int, hasty: None):
    """At two micro-batches a rank, it clearly beats W."""
    for count in sorted({1, num_ranks, num_ranks + 1, 2 * num_ranks, min(16, 4 * num_ranks)}):
        times = even(2 * num_ranks, **costs)
        others, result = named(num_ranks, count, times), chosen(num_ranks, count, times)
        assert result.seconds <= min(other.seconds for other in others.values()) + 1e-9
        assert max(result.live) <= max(max(other.live) for other in others.values())
        if num_ranks > 1 and count == 2 * num_ranks:
            assert others["folded_1f1b"].seconds / result.seconds >= 1.1


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_choice_on_uneven_stages(seed: int, hasty: None):
    rng = random.Random(seed)
    num_ranks, count = rng.randint(1, 5), rng.randint(1, 12)
    times = [[rng.uniform(0.5, 2) for _ in range(2 * num_ranks)] for _ in range(3)]
    costs = Costs(*times, transfer=rng.choice([0.0, 0.3]), gain=rng.choice([0.9, 1.0, 1.4]))
    result = chosen(num_ranks, count, costs)
    assert result.seconds <= min(other.seconds for other in named(num_ranks, count, costs).values()) + 1e-9
    assert format_schedule(choose_schedule(num_ranks, count, costs)[1]) == format_schedule(result.schedule)


@pytest.mark.slow
def test_the_choice_takes_seconds(monkeypatch: pytest.MonkeyPatch):
    """Two on an idle core, which run about so many slots."""
    slots, run = [], SlotClock.run
    monkeypatch.setattr(SlotClock, "run", lambda clock, rows: slots.extend(map(len, rows)) or run(clock, rows))
    choose_schedule(8, 64, even(16, **UNIT, gain=1.4, transfer=0.05))
    assert 0 < sum(slots) < 2_000_000


# Refinement


@pytest.mark.parametrize("seed", range(12))
def test_refinement_is_never_slower_and_keeps_to_its_room(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto, "TRIALS", 500)
    rng = random.Random(seed)
    name, num_ranks, count = rng.choice(list(PLACEMENT_OF)), rng.randint(1, 4), rng.randint(1, 8)
    ranks = stage_ranks(PLACEMENT_OF[name], num_ranks)
    times = [[rng.uniform(0.5, 2) for _ in ranks] for _ in range(3)]
    costs = Costs(*times, transfer=rng.choice([0.0, 0.3]), gain=rng.choice([1.0, 1.3]))
    before = simulate_schedule(build_schedule(name, num_ranks, count), ranks, costs)
    clock = SlotClock(ranks, costs, count)
    schedule = auto.improve_schedule(before.schedule, clock, max(before.live))
    validate(schedule, count, ranks)
    after = simulate_schedule(schedule, ranks, costs)
    run = clock.run([[clock.timed(slot) for slot in slots] for slots in schedule])
    assert run is not None
    assert run.ends == [ends[-1] for ends in after.ends]
    assert after.seconds <= before.seconds
    assert max(after.live) <= max(before.live)
    assert auto.improve_schedule(before.schedule, clock, max(before.live)) == schedule


@every_set
def test_refinement_helps(costs: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    """W alone becomes a schedule without most of its bubble, after a part of the usual changes."""
    monkeypatch.setattr(auto, "TRIALS", 3000)
    times = even(8, **costs)
    ranks = stage_ranks(FOLD, 4)
    before = simulate_schedule(build_schedule("folded_1f1b", 4, 8), ranks, times)
    after = simulate_schedule(auto.improve_schedule(before.schedule, SlotClock(ranks, times, 8), 9), ranks, times)
    assert before.seconds > 1.1 * after.seconds


# By name


def test_schedules_are_found_by_name_or_path(tmp_path: Path, hasty: None):
    costs, path = even(4), tmp_path / "schedule.txt"
    for name in PLACEMENT_OF:
        assert Scheduler(name, 2, costs).find(5) == (name, build_schedule(name, 2, 5))
        assert simulate_layers(name, 2, None)[1].schedule == build_schedule(name, 2, 6)
    assert Scheduler("auto", 2, costs).find(5) == choose_schedule(2, 5, costs)
    path.write_text(format_schedule(build_schedule("folded_1f1b", 2, 5)))
    assert Scheduler(str(path), 2, costs).find(5) == (str(path), build_schedule("folded_1f1b", 2, 5))
    assert simulate_layers(str(path), 2, None)[1].schedule == build_schedule("folded_1f1b", 2, 5)
    with pytest.raises(
        ValueError, match=r"'magic' is neither .* use one of auto, folded_1f1b, dualpipe_v, 1f1b, or the"
    ):
        Scheduler("magic", 2, costs)
