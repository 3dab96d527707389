"""Priority plans: a time and a priority for every operator, from which list scheduling orders whole windows.

In:   priorities, or what a file says of them.
Out:  a `PriorityPlan`.
Must hold: the order of a window follows from the plan and the schedule alone, so it is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hf_helix.planning.graph.pair import GraphPair
from hf_helix.planning.issued import Issued
from hf_helix.planning.layout import Layout
from hf_helix.planning.pipeline.actions import Schedule
from hf_helix.planning.pipeline.periodic import Gates
from hf_helix.planning.plans.block_plan import entries
from hf_helix.planning.plans.list_scheduler import ListScheduler, Priorities
from hf_helix.planning.plans.plan import Plan, check_known
from hf_helix.planning.text import round_ms

if TYPE_CHECKING:
    from typing import Self  # Python 3.11


@dataclass(frozen=True)
class PriorityPlan(Plan):
    """A plan that orders whole windows by list scheduling, see `ListScheduler`.

    Attributes:
        priorities: what the list scheduler needs besides the window itself.
    """

    KEY: ClassVar[str] = "priorities"
    BY_TIMES: ClassVar[bool] = True

    priorities: Priorities

    def issue(
        self,
        schedule: Schedule,
        layout: Layout,
        slots_ahead: int = 1,
        rank: int | None = None,
        gates: Gates = (),
    ) -> Issued:
        """The window as the list scheduler orders it, all ranks together. A receive is issued when, by the times of the
        plan, the other rank has sent, so `slots_ahead` means nothing here."""
        values = self.priorities
        scheduler = ListScheduler(schedule, layout, values.times, values.extra_live_layers)
        return scheduler.issue(values.priority, gates, values.held_units if layout.sums else None)

    def data(self) -> Any:
        """Milliseconds of every operator, the layers that may be alive, and the units that hold weight gradients back
        in the last backward, where there are any."""
        operators: dict[str, dict[str, Any]] = {}
        for (unit, entry), seconds in self.priorities.times.items():
            priority = self.priorities.priority.get((unit, entry), 0.0)
            figures = {"ms": round_ms(seconds, 9), "priority_ms": round_ms(priority, 9)}
            operators.setdefault(unit, {})[entry] = figures
        held = {} if self.priorities.held_units is None else {"held_units": self.priorities.held_units}
        return {"extra_live_layers": self.priorities.extra_live_layers, **held, "operators": operators}

    @classmethod
    def from_data(
        cls, data: Any, pairs: Mapping[str, GraphPair], *, rule: str, model: str, mesh: Mapping[str, int], graphs: str
    ) -> Self:
        """The plan of what a file says of its operators."""
        return cls(rule, model, dict(mesh), graphs, _priorities_from(data, pairs))


def _priorities_from(data: Any, pairs: Mapping[str, GraphPair]) -> Priorities:
    times, priority = {}, {}
    check_known(data["operators"], pairs, "unit")
    for unit, pair in pairs.items():
        figures = data["operators"].get(unit, {})
        known = entries(pair.forward, pair.backward)
        _check_entries(unit, figures, known)
        for entry in known:
            times[unit, entry], priority[unit, entry] = _seconds(f"{unit} {entry}", figures[entry])
    extra, held = data["extra_live_layers"], data.get("held_units")
    for name, value in {"extra_live_layers": extra, "held_units": 0 if held is None else held}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    return Priorities(times, priority, extra, held)


def _check_entries(unit: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ValueError where a unit's operators are not those of its graphs."""
    strange = sorted(given.keys() - known.keys())
    missing = [entry for entry in known if entry not in given]
    if strange:
        raise ValueError(f"unit {unit!r} has no operator {strange[0]!r}")
    if missing:
        raise ValueError(f"unit {unit!r} lacks the operator {missing[0]!r}")


def _seconds(name: str, figures: Mapping[str, Any]) -> tuple[float, float]:
    """Time and priority of an operator."""
    for key in ("ms", "priority_ms"):
        if key not in figures:
            raise ValueError(f"{name} lacks {key!r}")
    seconds, priority = (float(figures[key]) / 1e3 for key in ("ms", "priority_ms"))
    if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(priority)):
        raise ValueError(f"impossible figures of {name}: {dict(figures)}")
    return seconds, priority
