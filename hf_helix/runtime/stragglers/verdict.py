"""The verdict on slow ranks: from the times of all ranks in a few looks to a rank and a cause. Pure, without torch.

In:   the times of every rank in each look.
Out:  the rank that the others wait for, its cause and cost; or nothing.
Must hold: windows of all ranks take equally long, since ranks wait for each other, so a rank's own numbers cannot say
whether it is slow. Every number is compared with the same number of other ranks, and its part of theirs with its part
in the past. All causes have one currency: the share of the time of a window by which the rank takes longer. The largest
decides.

    cause              number                                                    compared with
    computing slower   time of an operator, median over operators                ranks with equal units and tokens
    link slower        time of the transfers at which the rank arrives last,     the group's past, or other groups
                       low quantile over transfers
    data late          time of data loading                                      the other ranks
    host busy          pauses, garbage collections, callbacks                    the other ranks

A slow core or link slows every window: it must do so in each of the last `LOOKS` looks, and the smallest share counts.
Late data and pauses are events, and most windows of a few milliseconds are free of them. All looks of the last `SPAN`
seconds count, without the one with the largest event, so one event is no verdict.

A rank that arrives at a transfer before others waits inside, so its time is no sign of its link.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COMPUTING, LINK, DATA, HOST = "computing slower", "link slower", "data late", "host busy"

LOOKS = 2  # in a row with the same slow core or link
SPAN = 2.0  # seconds of looks in which events count, at least `LOOKS` looks
PAST, LEAST_PAST = 8, 3  # looks before these: the most that count, and the fewest
GROWN, LARGE = 1.15, 1.25  # factors of a slower core: over the past, and without a past
LINK_FACTOR = 1.4
LEAST_SHARES = {COMPUTING: 0.02, LINK: 0.04, DATA: 0.05, HOST: 0.05}  # of a window's time
ALIKE = 0.02  # of the tokens of a micro-batch: the difference of ranks that are compared
LOW = 0.25  # the quantile of a rank's transfers that counts: other work of a host delays some, a slow link all
LEAST_LAST, FEWEST = 0.25, 4  # of a group's transfers, and how many, at which a rank must be last for its link to count


class Timed(NamedTuple):
    """An operator in a window: how often it ran, and its seconds for a run."""

    runs: int
    seconds: float


class Transfer(NamedTuple):
    """A transfer of a group: its operator, and when this rank has arrived and left, in seconds of its host's clock."""

    name: str
    start: float
    end: float


class Transfers(NamedTuple):
    """Transfers of a rank in one group, in the order that all its ranks have.

    Attributes:
        axis: of the mesh, by name.
        total: the number of transfers in a window.
        sample: some of them, the same on all ranks of the group.
    """

    axis: str
    total: int
    sample: Sequence[Transfer]


@dataclass(frozen=True)
class RankTimes:
    """The times of a rank in a look.

    Attributes:
        host: the name of its host.
        seconds: of a window with everything until the next.
        windows: since the look before.
        tokens: of a micro-batch.
        operators: computations, by names that only operators of equal sizes share.
        transfers: by group.
        data: seconds of data loading for a window.
        host_busy: seconds of the host for a window, by cause.
    """

    host: str
    seconds: float
    windows: int = 1
    tokens: float = 1.0
    operators: Mapping[str, Timed] = field(default_factory=dict)
    transfers: Mapping[str, Transfers] = field(default_factory=dict)
    data: float = 0.0
    host_busy: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> RankTimes:
        """Returns the times that another rank has sent as JSON."""
        operators = {name: Timed(*timed) for name, timed in fields["operators"].items()}
        transfers = {
            group: Transfers(axis, total, [Transfer(*one) for one in sample])
            for group, (axis, total, sample) in fields["transfers"].items()
        }
        return cls(**{**fields, "operators": operators, "transfers": transfers})


class Excess(NamedTuple):
    """What a rank takes longer than others.

    Attributes:
        share: of the time of a window.
        cause: one of four.
        detail: the operator, the axis, or the activity of the host.
        factor: of the time that it takes in other ranks; 0 if there is none to compare with.
        is_large: whether it is beyond noise.
    """

    share: float
    cause: str
    detail: str = ""
    factor: float = 0.0
    is_large: bool = False

    def __str__(self) -> str:
        times = f"{self.factor:.1f} times" if self.factor else ""
        about = ", ".join(filter(None, [times, self.detail]))
        return f"{self.cause} ({about})" if about else self.cause


class Verdict(NamedTuple):
    """A slow rank, or several with a slow link.

    Attributes:
        ranks: in the launcher's group, with `hosts`.
        excess: the cause.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    excess: Excess

    @property
    def about(self) -> tuple[tuple[int, ...], str]:
        """The ranks and the cause."""
        return self.ranks, self.excess.cause

    def __str__(self) -> str:
        names = [f"{rank} ({host})" for rank, host in zip(self.ranks, self.hosts, strict=True)]
        who = f"rank{'s' * (len(names) > 1)} {', '.join(names)}"
        return f"the others wait for {who}: {self.excess}, {min(1.0, self.excess.share):.0%} of the time of a step"


# -- a look ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Compared:
    """A look in which every rank is compared with the others.

    Attributes:
        times: of every rank.
        computing: by rank the part of its computations' time in others' time, the seconds of these, and the operator
            with the largest excess; None without a rank to compare with.
        links: by group its transfers in their order.
    """

    times: Sequence[RankTimes]
    computing: Sequence[tuple[float, float, str] | None]
    links: Mapping[str, Sequence[Arrival]]


class Arrival(NamedTuple):
    """The rank that arrives last at a transfer, the transfer's seconds from then on, and its operator."""

    rank: int
    seconds: float
    name: str


def compare(times: Sequence[RankTimes]) -> Compared:
    """Returns a look of all ranks, compared."""
    groups = dict.fromkeys(group for each in times for group in each.transfers)
    members = {group: {rank: each for rank, each in enumerate(times) if group in each.transfers} for group in groups}
    links = {group: list(_arrivals(group, each)) for group, each in members.items()}
    return Compared(times, _compared_operators(times), links)


def _compared_operators(times: Sequence[RankTimes]) -> list[tuple[float, float, str] | None]:
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, each in enumerate(times):
        for name, timed in each.operators.items():
            by_name[name][rank] = timed.seconds
    found: list[tuple[float, float, str] | None] = []
    for rank, each in enumerate(times):
        weighed, worst = [], (0.0, "")
        for name, timed in each.operators.items():
            others = [
                seconds for other, seconds in by_name[name].items() if other != rank and _is_like(each, times[other])
            ]
            if others and (usual := statistics.median(others)) > 0:
                weighed.append((timed.seconds / usual, timed.runs * usual))
                worst = max(worst, (timed.runs * (timed.seconds - usual), name))
        found.append((_weighted_quantile(weighed), sum(weight for _, weight in weighed), worst[1]) if weighed else None)
    return found


def _arrivals(group: str, members: Mapping[int, RankTimes]) -> Iterator[Arrival]:
    """Yields the last arrivals at the transfers of a group; nothing unless all its ranks have the same ones."""
    samples = {rank: each.transfers[group].sample for rank, each in members.items()}
    if len(samples) < 2 or len({len(sample) for sample in samples.values()}) > 1:
        return
    ahead = _clocks({rank: each.host for rank, each in members.items()}, samples)
    for place in range(len(next(iter(samples.values())))):
        last = max(samples, key=lambda rank: samples[rank][place].start - ahead[rank])
        name, start, end = samples[last][place]
        yield Arrival(last, end - start, name)


def _clocks(hosts: Mapping[int, str], samples: Mapping[int, Sequence[Transfer]]) -> dict[int, float]:
    """Returns by how much the clock of each rank's host is ahead of the first rank's.

    No rank leaves a transfer before all have arrived, which bounds the difference of two clocks from both sides.
    """
    first, *_ = samples
    ahead = {hosts[first]: 0.0}
    for rank, sample in samples.items():
        if hosts[rank] not in ahead:
            pairs = list(zip(samples[first], sample, strict=True))
            least = max(theirs.start - mine.end for mine, theirs in pairs)
            most = min(theirs.end - mine.start for mine, theirs in pairs)
            ahead[hosts[rank]] = (least + most) / 2
    return {rank: ahead[host] for rank, host in hosts.items()}


def _is_like(one: RankTimes, other: RankTimes) -> bool:
    """Whether two ranks have as many tokens in a micro-batch, so that their operators have equal work."""
    return abs(one.tokens - other.tokens) <= ALIKE * one.tokens


def _weighted_quantile(weighed: Iterable[tuple[float, float]], share: float = 0.5) -> float:
    """Returns the value below which a share of the weights lies, of values with their weights."""
    ordered = sorted(weighed)
    passed = itertools.accumulate(weight for _, weight in ordered)
    least = share * sum(weight for _, weight in ordered)
    return next((value for (value, _), weight in zip(ordered, passed, strict=True) if weight >= least), ordered[-1][0])


# -- looks -----------------------------------------------------------------------------------------------------------


class History:
    """The looks of a plan. Looks with a verdict are no past to compare with, so a rank that stays slow stays named."""

    def __init__(self) -> None:
        self._past: deque[Compared] = deque(maxlen=PAST)
        self._last: deque[Compared] = deque(maxlen=LOOKS)
        self._span: deque[Compared] = deque()
        self._excesses: list[list[Excess]] = []  # by rank
        self._named: list[Compared] = []  # of the last

    def add(self, look: Compared) -> Verdict | None:
        """Takes a look; returns the verdict of the last ones."""
        if len(self._last) == LOOKS and self._last[0] not in self._named:
            self._past.append(self._last[0])
        self._last.append(look)
        self._span.append(look)
        while len(self._span) > LOOKS and _seconds_of([*self._span][1:]) >= SPAN:
            self._span.popleft()
        usual = [{group: _usual(each, self._past, group) for group in each.links} for each in self._last]
        ranks = range(len(look.times))
        self._excesses = [_excesses(self._past, self._last, usual, self._span, rank) for rank in ranks]
        verdict = judge(look, self._excesses) if len(self._last) == LOOKS else None
        self._named = [*self._last] if verdict else [each for each in self._named if each in self._last]
        return verdict

    def slowest(self) -> tuple[int, float] | None:
        """Returns the rank with the largest excess that lasts over the last looks, and its share of a step's time,
        without a word on whether it is noise; None before the first look."""
        if not self._excesses:
            return None
        shares = [max(each.share for each in excesses) for excesses in self._excesses]
        most = max(range(len(shares)), key=shares.__getitem__)
        return most, min(1.0, max(0.0, shares[most]))


def judge(look: Compared, excesses: Sequence[Sequence[Excess]]) -> Verdict | None:
    """Returns the verdict of a look, from the excesses of every rank that last; None without one."""
    found = {}
    for rank, lasting in enumerate(excesses):
        large = [each for each in lasting if each.is_large]
        if large and (most := max(large)).share >= LEAST_SHARES[most.cause]:
            found[rank] = most
    if not found:
        return None
    worst = max(found, key=lambda rank: found[rank])
    ranks = [worst]
    if found[worst].cause == LINK:  # a slow link between hosts slows all ranks of a group
        ranks = [rank for rank, each in found.items() if each.cause == LINK and each.share > 0.8 * found[worst].share]
    return Verdict(tuple(ranks), tuple(look.times[rank].host for rank in ranks), found[worst])


def _excesses(
    past: Sequence[Compared],
    last: Sequence[Compared],
    usual: Sequence[Mapping[str, Sequence[float]]],
    span: Sequence[Compared],
    rank: int,
) -> list[Excess]:
    """Returns the excess of a rank by every cause.

    Args:
        past: looks before the last.
        last: `LOOKS` of them, or fewer at first.
        usual: for each of the last looks, by group the usual seconds of its transfers.
        span: the looks of the last `SPAN` seconds.
        rank: the rank.
    """
    return [
        min(_computing(look, past, rank) for look in last),
        min(_link(look, times, rank) for look, times in zip(last, usual, strict=True)),
        _events(span, rank, DATA, lambda times: {"": times.data}),
        _events(span, rank, HOST, lambda times: times.host_busy),
    ]


def _events(
    span: Sequence[Compared], rank: int, cause: str, seconds_of: Callable[[RankTimes], Mapping[str, float]]
) -> Excess:
    """Returns the excess of a rank by events: in all looks of a span but the one with the most."""
    causes: Counter[str] = Counter()
    seconds = {}
    for look in span:
        windows, mine = look.times[rank].windows, seconds_of(look.times[rank])
        others = [seconds_of(each) for other, each in enumerate(look.times) if other != rank]
        late = {
            name: windows * (value - statistics.median(each.get(name, 0.0) for each in others))
            for name, value in mine.items()
        }
        causes.update(late)
        seconds[look] = sum(late.values())
    rest = sorted(span, key=seconds.__getitem__)[:-1]
    share = sum(seconds[look] for look in rest) / _seconds_of(rest) if rest else 0.0
    return Excess(share, cause, max(causes, key=causes.__getitem__, default=""), is_large=True)


def _seconds_of(looks: Sequence[Compared]) -> float:
    """Returns the time of the windows of some looks."""
    return sum(look.times[0].windows * look.times[0].seconds for look in looks)


def _computing(look: Compared, past: Sequence[Compared], rank: int) -> Excess:
    found = look.computing[rank]
    if found is None:
        return Excess(0.0, COMPUTING)
    factor, seconds, operator = found
    earlier = [each.computing[rank] for each in past if rank < len(each.computing)]
    known = [each[0] for each in earlier if each is not None]
    grown = factor / statistics.median(known) if len(known) >= LEAST_PAST else 0.0
    most = max(factor if factor >= LARGE else 0.0, grown)
    share = (most - 1) * seconds / look.times[rank].seconds
    return Excess(share, COMPUTING, f"most in {plain(operator)}", most, most >= GROWN)


def plain(operator: str) -> str:
    """Returns the name of an operator for people: of `B layers.mlp.up.W [1f3a]` it is `layers.mlp.up.W`."""
    return operator.partition(" [")[0].partition(" ")[2] or operator


def _link(look: Compared, usual: Mapping[str, Sequence[float]], rank: int) -> Excess:
    groups = look.times[rank].transfers.items()
    excesses = (_link_of_group(look, usual[group], rank, group, transfers) for group, transfers in groups)
    return max(excesses, default=Excess(0.0, LINK))


def _link_of_group(look: Compared, usual: Sequence[float], rank: int, group: str, transfers: Transfers) -> Excess:
    if not usual:
        return Excess(0.0, LINK, transfers.axis)
    arrivals = list(zip(look.links[group], usual, strict=True))
    weighed = [(arrival.seconds / each, each) for arrival, each in arrivals if arrival.rank == rank]
    if len(weighed) < FEWEST or sum(weight for _, weight in weighed) < LEAST_LAST * sum(usual):
        return Excess(0.0, LINK, transfers.axis)
    factor, seconds = _weighted_quantile(weighed, LOW), sum(usual) * transfers.total / len(usual)
    share = (factor - 1) * seconds / look.times[rank].seconds
    return Excess(share, LINK, f"axis {transfers.axis}", factor, factor >= LINK_FACTOR)


def _usual(look: Compared, past: Sequence[Compared], group: str) -> list[float]:
    """Returns the usual seconds of the transfers of a group: of its past, or of other groups of the axis that reach
    over as many hosts; nothing if there are none."""
    operators, tokens = [arrival.name for arrival in look.links[group]], _tokens(look, group)
    known = [(each.links.get(group, ()), _tokens(each, group)) for each in past]
    if len(known) < LEAST_PAST:
        about = _about(look.times, group)
        like = [other for other in look.links if other != group and _about(look.times, other) == about]
        known = [(look.links[other], _tokens(look, other)) for other in like]
    # Times of large transfers grow with the tokens, those of small ones do not: the longer of both is usual.
    scaled = [
        [arrival.seconds * max(1.0, tokens / before) for arrival in arrivals]
        for arrivals, before in known
        if before and [arrival.name for arrival in arrivals] == operators
    ]
    return [max(statistics.median(each), 1e-9) for each in zip(*scaled, strict=True)]


def _tokens(look: Compared, group: str) -> float:
    """Returns the tokens of a micro-batch of a group's ranks; 0 if no rank has the group."""
    return max((each.tokens for each in look.times if group in each.transfers), default=0.0)


def _about(times: Sequence[RankTimes], group: str) -> tuple[str, int]:
    """Returns the axis of a group, and the number of its hosts."""
    members = [each for each in times if group in each.transfers]
    return members[0].transfers[group].axis, len({each.host for each in members})
