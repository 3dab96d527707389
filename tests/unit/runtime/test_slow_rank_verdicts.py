"""The verdict on slow ranks, on drawn looks of ranks that wait for each other."""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from hf_helix.runtime.stragglers.verdict import (
    COMPUTING,
    DATA,
    HOST,
    LEAST_PAST,
    LINK,
    LOOKS,
    Compared,
    History,
    RankTimes,
    Timed,
    Transfer,
    Transfers,
    Verdict,
    compare,
)

GROUPS = {
    "tp of 0,1": ("tp", (0, 1)),
    "tp of 2,3": ("tp", (2, 3)),
    "dp of 0,2": ("dp", (0, 2)),
    "dp of 1,3": ("dp", (1, 3)),
}
SECONDS = {"F layers.mlp.up [a]": 0.010, "B layers.mlp.up.W [a]": 0.012, "F layers.attention [a]": 0.004}
WINDOW, TRANSFER = 1.0, 0.008


@dataclasses.dataclass
class World:
    """Four ranks, of which some are slow.

    Attributes:
        cores, links: by rank, times as slow.
        data, pauses: seconds by rank.
        is_emulated: whether a transfer takes its time on every rank by itself, from the rank's arrival on.
        hosts: of the ranks; clocks of other hosts are ahead.
        noise: of every time.
    """

    draw: random.Random
    cores: dict[int, float] = dataclasses.field(default_factory=dict)
    links: dict[int, float] = dataclasses.field(default_factory=dict)
    data: dict[int, float] = dataclasses.field(default_factory=dict)
    pauses: dict[int, float] = dataclasses.field(default_factory=dict)
    is_emulated: bool = True
    hosts: Sequence[str] = ("a", "a", "a", "a")
    tokens: Sequence[float] = (256, 256, 256, 256)
    noise: float = 0.04
    world: int = 4
    seconds: float = WINDOW
    windows: int = 1

    def look(self) -> Compared:
        samples = {group: self.transfers(ranks) for group, (_, ranks) in GROUPS.items()}
        return compare([self.times(rank, samples) for rank in range(self.world)])

    def times(self, rank: int, samples: Any) -> RankTimes:
        transfers = {
            group: Transfers(axis, 100, samples[group][rank])
            for group, (axis, ranks) in GROUPS.items()
            if rank in ranks
        }
        core, tokens = self.cores.get(rank, 1.0) * self.around(), self.tokens[rank] / 256
        return RankTimes(
            host=self.hosts[rank],
            seconds=self.seconds,
            windows=self.windows,
            tokens=self.tokens[rank],
            operators={name: Timed(16, seconds * core * self.around() * tokens) for name, seconds in SECONDS.items()},
            transfers=transfers,
            data=0.01 * self.seconds * self.around() + self.data.get(rank, 0.0),
            host_busy={
                "garbage collection": 0.01 * self.seconds * self.around(),
                "pauses": self.pauses.get(rank, 0.0),
            },
        )

    def transfers(self, ranks: Sequence[int]) -> dict[int, list[Transfer]]:
        """Transfers one after the other: each rank comes when it is through with the one before, and has computed."""
        free, made = dict.fromkeys(ranks, 0.0), {rank: list[Transfer]() for rank in ranks}
        for place in range(40):
            arrived = {rank: free[rank] + 0.002 * self.draw.random() * self.cores.get(rank, 1.0) for rank in ranks}
            own = {rank: TRANSFER * self.links.get(rank, 1.0) * self.around() for rank in ranks}
            last = max(arrived.values())
            for rank in ranks:
                end = max(arrived[rank] + own[rank], last) if self.is_emulated else last + max(own.values())
                clock = 100.0 * "abcd".index(self.hosts[rank])
                made[rank].append(Transfer(("F gather", "B scatter")[place % 2], arrived[rank] + clock, end + clock))
                free[rank] = end
        return made

    def around(self) -> float:
        return 1 + self.draw.uniform(-self.noise, self.noise)


def verdict_of(before: World, after: World, looks: int = LOOKS) -> Verdict | None:
    return verdicts([*(before.look() for _ in range(8)), *(after.look() for _ in range(looks))])[-1]


def verdicts(looks: Iterable[Compared]) -> list[Verdict | None]:
    history = History()
    return [history.add(look) for look in looks]


FAULTS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "core": (COMPUTING, lambda rank: {"cores": {rank: 1.3}}),
    "link": (LINK, lambda rank: {"links": {rank: 2.0}}),
    "data": (DATA, lambda rank: {"data": {rank: 0.1}}),
    "host": (HOST, lambda rank: {"pauses": {rank: 0.1}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_rank(fault: str) -> None:
    cause, options = FAULTS[fault]
    for seed in range(50):
        draw, rank = random.Random(seed), seed % 4
        verdict = verdict_of(World(draw), World(draw, **options(rank)))
        assert verdict is not None, seed
        assert (verdict.ranks, verdict.excess.cause) == ((rank,), cause), (seed, str(verdict))


def test_noise_is_not_named() -> None:
    draw = random.Random(1)
    assert set(verdicts(World(draw).look() for _ in range(500))) == {None}


@pytest.mark.parametrize("fault", ["core", "data", "host"])
def test_a_rank_that_was_always_slow_is_named(fault: str) -> None:
    cause, options = FAULTS[fault]
    world = World(random.Random(3), **options(2))
    verdict = verdicts(world.look() for _ in range(LOOKS))[-1]
    assert verdict is not None
    assert verdict.about == ((2,), cause)


def test_a_single_look_names_nobody() -> None:
    draw = random.Random(2)
    assert verdict_of(World(draw), World(draw, data={1: 0.3}), looks=1) is None


def test_a_real_link_slows_all_ranks_of_its_groups() -> None:
    """Their transfers take equally long, so the ranks of the slow group are named together."""
    draw = random.Random(4)
    before, after = (World(draw, is_emulated=False, links=links) for links in ({}, {1: 2.0}))
    verdict = verdict_of(before, after)
    assert verdict is not None
    assert verdict.excess.cause == LINK
    assert 1 in verdict.ranks


@pytest.mark.parametrize("kind", ["data", "pauses"])
@pytest.mark.parametrize("windows", [1, 5])
def test_events_between_short_looks_are_named(kind: str, windows: int) -> None:
    """Most looks of a few milliseconds have no event: those of some seconds count together, and one event does not."""
    draw, length = random.Random(12), 0.04

    def look(number: int, every: int) -> Compared:
        delay = {1: 0.15 / windows} if number % every == every - 1 else {}
        return World(draw, seconds=length + sum(delay.values()), windows=windows, **{kind: delay}).look()

    found = verdicts(look(number, 12 // windows) for number in range(60))
    named = [each.about for each in found if each is not None]
    assert set(named) == {((1,), DATA if kind == "data" else HOST)}
    assert found[: 12 // windows] == [None] * (12 // windows)
    assert len(named) > 30
    assert set(verdicts(look(number, 100) for number in range(180))) == {None}


@pytest.mark.parametrize("emulated", [True, False])
def test_clocks_of_hosts_may_differ(emulated: bool) -> None:
    draw = random.Random(5)
    common: dict[str, Any] = {"hosts": ("a", "b", "c", "d"), "is_emulated": emulated}
    verdict = verdict_of(World(draw, **common), World(draw, **common, links={3: 2.0}))
    assert verdict is not None
    assert verdict.excess.cause == LINK
    assert 3 in verdict.ranks
    assert verdict_of(World(draw, **common), World(draw, **common)) is None


def test_longer_sequences_of_a_rank_are_no_slower_core() -> None:
    draw = random.Random(6)
    assert verdict_of(World(draw), World(draw, tokens=(256, 256, 512, 512))) is None


def test_larger_slices_of_a_rank_are_no_slower_core() -> None:
    """Names of operators contain the sizes of their units, and only equal names are compared."""

    def look() -> Compared:
        times = World(draw).look().times
        renamed = {f"{name} larger": Timed(16, 3 * timed.seconds) for name, timed in times[1].operators.items()}
        return compare([times[0], dataclasses.replace(times[1], operators=renamed), *times[2:]])

    draw = random.Random(7)
    assert set(verdicts(look() for _ in range(10))) == {None}


def test_the_line_has_rank_host_cause_and_cost() -> None:
    draw, hosts = random.Random(8), ("node-a", "node-b", "node-c", "node-d")
    after = [
        dataclasses.replace(each, host=hosts[rank])
        for rank, each in enumerate(World(draw, cores={3: 1.5}).look().times)
    ]
    history = History()
    assert history.slowest() is None
    looks = [*(World(draw).look() for _ in range(LEAST_PAST + LOOKS)), compare(after), compare(after)]
    said = [str(history.add(look)) for look in looks][-1]
    assert re.fullmatch(
        r"the others wait for rank 3 \(node-d\): computing slower \(1\.[45] times, most in layers\.mlp\.up(\.W)?\), "
        r"[12]\d% of the time of a step",
        said,
    ), said
    slowest = history.slowest()
    assert slowest is not None
    assert slowest[0] == 3
    assert 0.1 < slowest[1] < 0.3


def test_a_rank_that_stays_slow_stays_named() -> None:
    """Its slow looks do not become the past that it is compared with; afterwards nobody is named."""
    draw = random.Random(11)
    worlds = [*[World(draw)] * 8, *[World(draw, links={1: 2.0})] * 40, *[World(draw)] * 8]
    found = verdicts(world.look() for world in worlds)
    assert {each.about for each in found if each is not None} == {((1,), LINK)}
    assert [each is not None for each in found] == [False] * 9 + [True] * 39 + [False] * 8


def test_times_travel_as_json() -> None:
    times = World(random.Random(9)).look().times[2]
    assert RankTimes.read(json.loads(json.dumps(vars(times)))) == times


def test_transfers_of_longer_sequences_are_no_slower_link() -> None:
    """Times that grow with the tokens, and times that do not, when the sequences of all ranks change."""

    def look(factor: float, tokens: float) -> Compared:
        times = World(draw, tokens=(tokens,) * 4).look().times
        return compare([dataclasses.replace(each, transfers=stretched(each, factor)) for each in times])

    def stretched(times: RankTimes, factor: float) -> dict[str, Transfers]:
        return {
            group: each._replace(
                sample=[Transfer(name, factor * start, factor * end) for name, start, end in each.sample]
            )
            for group, each in times.transfers.items()
        }

    draw = random.Random(10)
    for factor, tokens in ((2.0, 512), (1.0, 128)):
        looks = [*(look(1.0, 256) for _ in range(8)), *(look(factor, tokens) for _ in range(LOOKS))]
        assert set(verdicts(looks)) == {None}
