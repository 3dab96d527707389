"""Schedulers: the schedule of a window of any length, by the name that a user gives.

In:   a name, `auto` or the path of an action file; the number of pipeline ranks; for `auto`, the costs of the stages.
Out:  a schedule.
Must hold: a pure function of its inputs, the same on every rank; the placement depends neither on the window nor on the
costs, so layers never move.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_helix.config import AUTO, SCHEDULES, HelixConfig
from hf_helix.planning.choice.auto import choose_schedule
from hf_helix.planning.choice.memory import MemoryLimit
from hf_helix.planning.choice.slot_clock import SLICE, Costs, Simulated, simulate_schedule, stage_costs
from hf_helix.planning.schedule.actions import (
    Schedule,
    format_schedule,
    num_microbatches_of,
    parse_schedule,
    without_microbatches,
)
from hf_helix.planning.schedule.named import FOLDED, PLACEMENT_OF, build_schedule
from hf_helix.planning.schedule.placement import FOLD, LINEAR, SPREAD, split_layers, stage_ranks
from hf_helix.planning.schedule.validate import validate
from hf_helix.planning.timing.profile import Profile

ON_ONE_RANK = "folded_1f1b"  # one rank has no bubble, so `auto` has nothing to choose


class Scheduler:
    """Makes the schedule of a window. Without costs, `auto` takes the best of a few schedules for equal stages.

    Args:
        name: of a schedule, `auto`, or the path of an action file.
        costs: of every virtual stage; None without a measurement.
        limit: of the memory of a window, which `auto` keeps to; None without a limit.
        spread: whether pipeline ranks have slices of the vocabulary, see `HelixConfig.spread_vocabulary`; None for an
            action file of either.

    Attributes:
        placement: of the virtual stages; of `auto`, the fold, with slices of the vocabulary or without.
        max_microbatches: of an action file; None without a limit.

    Raises:
        ValueError: no such schedule, or an action file that is damaged or for another number of ranks.
        OSError: the action file cannot be read.
    """

    def __init__(
        self,
        name: str,
        num_ranks: int,
        costs: Costs | None = None,
        limit: MemoryLimit | None = None,
        spread: bool | None = False,
    ) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self._limit = limit
        self._costs = costs
        self._made: dict[int, tuple[str, Schedule]] = {}
        self.max_microbatches: int | None = None
        self.placement = PLACEMENT_OF.get(name, SPREAD if spread else FOLD)
        if name not in SCHEDULES:
            check_schedule(name)
            schedule = load_schedule(name, num_ranks)
            self.placement, self.max_microbatches = placement_of(schedule), num_microbatches_of(schedule)
        if spread not in (None, self.placement == SPREAD):
            raise ValueError(
                f"spread_vocabulary={spread} with schedule={name!r}, which is for spread_vocabulary={not spread}, since"
                " slices of the vocabulary are virtual stages of their own; use schedule='auto'"
            )

    def __call__(self, num_microbatches: int) -> Schedule:
        """The schedule of a window."""
        return self.find(num_microbatches)[1]

    def find(self, num_microbatches: int) -> tuple[str, Schedule]:
        """The schedule of a window after its label: its name or, for `auto`, the label of `choose_schedule`.

        Raises:
            ValueError: as `build_schedule` and `load_schedule`.
        """
        if num_microbatches not in self._made:
            self._made[num_microbatches] = self._find(num_microbatches)
        return self._made[num_microbatches]

    def _find(self, count: int) -> tuple[str, Schedule]:
        name = ON_ONE_RANK if self.name == AUTO and self.num_ranks == 1 else self.name
        if name in PLACEMENT_OF:
            return name, build_schedule(name, self.num_ranks, count)
        if name != AUTO:
            return name, load_schedule(name, self.num_ranks, count)
        slices = self.num_ranks - 1 if self.placement == SPREAD else 0
        costs = self._costs or Costs.even(len(stage_ranks(self.placement, self.num_ranks)), slices)
        searches = self._costs is not None
        return choose_schedule(
            self.num_ranks, count, costs, search=searches, limit=self._limit, placement=self.placement
        )


def scheduler_of(config: HelixConfig, costs: Costs | None = None, limit: MemoryLimit | None = None) -> Scheduler:
    """Returns the scheduler of a configuration.

    Args:
        config: with the name of the schedule, the pipeline ranks, and whether they share the vocabulary.
        costs, limit: see `Scheduler`.
    """
    return Scheduler(config.schedule, config.pp_size, costs, limit, config.spread_vocabulary)


def schedule_names(name: str, num_ranks: int) -> tuple[str, ...]:
    """The names of the schedules that a run under `name` may choose from."""
    return (*FOLDED, AUTO) if name == AUTO and num_ranks > 1 else (name,)


def candidates(
    name: str, profile: Profile, num_microbatches: int | None = None, limit: MemoryLimit | None = None
) -> list[Scheduler]:
    """The schedulers that a measured run may choose from, all of one placement.

    Args:
        name: of the schedule that the run asks for.
        num_microbatches: of the windows; None for three for each rank.
        limit: of the memory of a window; `auto` leaves out named schedules that exceed the limit.
    """
    num_ranks = profile.layout.num_ranks
    if profile.layout.is_spread:
        measured = Scheduler(name, num_ranks, stage_costs(profile), limit, spread=True)
        return [Scheduler(name, num_ranks, spread=True), measured]
    names = schedule_names(name, num_ranks)
    if len(names) == 1:
        return [Scheduler(name, num_ranks)]
    count = num_microbatches or 3 * num_ranks
    fitting = [each for each in FOLDED if limit is None or limit.excess(build_schedule(each, num_ranks, count)) <= 0]
    return [*(Scheduler(each, num_ranks) for each in fitting), Scheduler(AUTO, num_ranks, stage_costs(profile), limit)]


def check_schedule(name: str) -> None:
    """Raises ValueError if a text is neither the name of a schedule nor the path of a file."""
    if name not in SCHEDULES and not Path(name).is_file():
        raise ValueError(
            f"schedule={name!r} is neither the name of a schedule nor an existing file; "
            f"use one of {', '.join(SCHEDULES)}, or the path of an action file"
        )


def simulate_layers(
    name: str, num_ranks: int, num_microbatches: int | None, num_layers: int | None = None, **times: float
) -> tuple[str, Simulated]:
    """Simulates a schedule of `num_layers` equal layers, by default two for each rank; returns its label and the
    simulation. By default, a window has all micro-batches of an action file, otherwise three for each rank."""

    def costs(ranks: Sequence[int]) -> Costs:
        slices = num_ranks - 1 if len(ranks) > 2 * num_ranks else 0
        of_layers = ranks[slices : len(ranks) - slices]
        layers = split_layers(2 * num_ranks if num_layers is None else num_layers, of_layers)
        ends = [SLICE] * slices
        return Costs.of_layers([*ends, *map(len, layers), *ends], **times)

    of_fold = costs(stage_ranks(FOLD, num_ranks)) if name == AUTO else None
    scheduler = Scheduler(name, num_ranks, of_fold, spread=None)
    count = scheduler.max_microbatches or 3 * num_ranks if num_microbatches is None else num_microbatches
    label, schedule = scheduler.find(count)
    ranks = stage_ranks(scheduler.placement, num_ranks)
    return label, simulate_schedule(schedule, ranks, costs(ranks))


def load_schedule(path: str | Path, num_ranks: int, num_microbatches: int | None = None) -> Schedule:
    """Returns the schedule of an action file, validated, for a window; the file may have more micro-batches.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no schedule, cannot run, or is for fewer micro-batches.
    """
    try:
        schedule = parse_schedule(Path(path).read_text(), num_ranks)
        written_for = num_microbatches_of(schedule)
        validate(schedule, written_for, stage_ranks(placement_of(schedule), num_ranks))
    except ValueError as error:
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"schedule file {path}: {reason}") from error
    if num_microbatches is None:
        return schedule
    if written_for < num_microbatches:
        raise ValueError(
            f"schedule file {path} is for {written_for} micro-batches and the window has {num_microbatches}; take at "
            f"most {written_for} micro-batches a step, write the file for {num_microbatches}, or use schedule='auto', "
            "which goes with any number"
        )
    return without_microbatches(schedule, num_microbatches)


def placement_of(schedule: Schedule) -> str:
    """The placement of a schedule, by its number of virtual stages.

    Raises:
        ValueError: no placement has this number of stages.
    """
    num_ranks = len(schedule)
    num_stages = 1 + max((action.stage for slots in schedule for slot in slots for action in slot.actions), default=-1)
    for placement in (LINEAR, FOLD, SPREAD):
        if num_stages == len(stage_ranks(placement, num_ranks)):
            return placement
    raise ValueError(
        f"the schedule has {num_stages} virtual stages on {num_ranks} ranks; it needs {num_ranks} (one for each rank) "
        f"or {2 * num_ranks} (folded, two for each), or {4 * num_ranks - 2} with slices of the vocabulary:\n"
        f"{format_schedule(schedule)}"
    )
