"""Plans: the static order in which every rank issues operators.

`Plan` is the base of all kinds of plans: `BlockPlan` lists orders, `PriorityPlan` computes orders from priorities. An
order is valid on every device, see `planning.timing.operator_clock`; `planning.window.passes` completes the order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import digest
from hf_helix.planning.schedule.actions import Schedule, SyncPoints
from hf_helix.planning.text import format_json
from hf_helix.planning.window.layout import Layout
from hf_helix.planning.window.passes import OrderedWindow

FORMAT = "hf_helix.plan/1"


@dataclass(frozen=True)
class Plan(ABC):
    """A plan.

    Attributes:
        rule: the name of the plan's rule, see `planning.rules.registry`.
        model: the class of its model.
        mesh: the sizes of its mesh.
        graphs: a digest of the model's graphs, see `graphs_digest`.
        KEY: the key of the plan file for the part of this kind of plan.
        BY_TIMES: whether the order of a rank depends on the times of all ranks.
    """

    KEY: ClassVar[str]
    BY_TIMES: ClassVar[bool] = False

    rule: str
    model: str
    mesh: Mapping[str, int]
    graphs: str

    @abstractmethod
    def issue(
        self,
        schedule: Schedule,
        layout: Layout,
        slots_ahead: int = 1,
        rank: int | None = None,
        sync_points: SyncPoints = (),
    ) -> OrderedWindow:
        """Returns a window in the order of issue.

        Args:
            layout: the units of all ranks.
            slots_ahead: the number of slots from a receive to its reader, unless the plan orders receives.
            rank: the only rank to order; None for all.
            sync_points: see `SyncPoints`; a plan that orders slot by slot needs none.
        """

    @abstractmethod
    def data(self) -> Any:
        """The part of the plan file under `KEY`."""

    @classmethod
    @abstractmethod
    def fields_from(cls, data: Any, pairs: Mapping[str, GraphPair]) -> dict[str, Any]:
        """Returns the fields of this kind of plan from `data` of a file, checked against the model's graphs.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: the data is damaged.
        """

    def to_json(self) -> str:
        """Returns the text form of plan files: JSON, an operator a line."""
        data = {"format": FORMAT, "rule": self.rule, "model": self.model, "mesh": dict(self.mesh)}
        return format_json({**data, "graphs": self.graphs, self.KEY: self.data()}) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file for `HelixConfig(plan=path)`."""
        Path(path).write_text(self.to_json())


def graphs_digest(pairs: Mapping[str, GraphPair]) -> str:
    """The fingerprint of every graph of a model."""
    return digest(graph for pair in pairs.values() for graph in (pair.forward, pair.backward))


def check_known(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises ValueError for the first name that is unknown to a model.

    Args:
        names: of a file.
        known: of the model.
        what: the kind of name, for the error.
    """
    strange = sorted(set(names) - set(known))
    if strange:
        raise ValueError(f"this model has no {what} {strange[0]!r}")
