"""A model with the amounts of its layouts, each counted once.

In:   a Transformers configuration, or a model on the meta device; a cluster; a folder of earlier counts.
Out:  `Facts`, `Amounts`.
Must hold: a layout counted before, now or in an earlier process, is not counted again; torch and Transformers are
imported for counting only.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from hf_helix.config import OFFLOAD, SCHEDULES
from hf_helix.doctor.amounts.coarse import coarse_amounts
from hf_helix.doctor.amounts.kept import KeptAmounts
from hf_helix.doctor.amounts.records import Amounts, Facts
from hf_helix.doctor.case import Case
from hf_helix.doctor.estimate import inter_node_axes
from hf_helix.planning.timing.cluster import Cluster

if TYPE_CHECKING:
    from hf_helix.doctor.counting import Counter

Answer = TypeVar("Answer")


class SimulatedModel:
    """A model with the amounts of its layouts, each counted once; the cluster decides which axes leave a node, and so
    the kind of their communication.

    Args:
        model: on the meta device, or a configuration, or the path of it; or a function that returns one of these.
        cluster: the cluster.
        images_per_row: the images of every row; None for one if the model has a tower whose work can be counted.
        kept: the counts of earlier processes; None to keep none.
    """

    def __init__(
        self, model: Any, cluster: Cluster, images_per_row: int | None = None, kept: KeptAmounts | None = None
    ) -> None:
        self.cluster = cluster
        self._given, self._images, self._kept = model, images_per_row, kept
        self._amounts: dict[str, Amounts | ValueError] = {}
        self._coarse: dict[str, Amounts] = {}
        facts = self.facts
        if facts.without_images and images_per_row:
            raise ValueError(facts.without_images)
        self.without_images = facts.without_images if images_per_row != 0 else ""
        self.image_tokens = facts.image_tokens if images_per_row != 0 else 0
        self.images_per_row = (1 if images_per_row is None else images_per_row) if self.image_tokens else 0

    @functools.cached_property
    def _counter(self) -> Counter:
        from hf_helix.doctor.counting import Counter

        given = self._given
        return Counter(given() if inspect.isfunction(given) else given, self._images)

    @functools.cached_property
    def facts(self) -> Facts:
        """The properties of the model."""
        return self._counter.facts() if self._kept is None else self._kept.value("facts", lambda: self._counter.facts())

    @property
    def model(self) -> Any:
        """The model, on the meta device."""
        return self._counter.model

    def on(self, cluster: Cluster) -> SimulatedModel:
        """Returns the same model on another cluster of the same kind of devices; amounts are counted once for both."""
        other = copy.copy(self)
        other.cluster = cluster
        return other

    @property
    def name(self) -> str:
        """Class of the model."""
        return self.facts.name

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.facts.layers

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 1 for a dense model."""
        return self.facts.experts

    def check_length(self, length: int) -> None:
        """Raises ValueError if rows are longer than the tables of positions."""
        positions = self.facts.positions
        if positions is not None and length > positions:
            raise ValueError(
                f"--sequence_length {length}: {self.name} has embeddings of {positions:,} positions; give "
                f"--sequence_length {positions}, or less"
            )

    def image_share(self, length: int) -> float:
        """Returns the part of the tokens of a row that are of images. Raises ValueError if they are longer than it."""
        tokens = self.images_per_row * self.image_tokens
        if tokens > length:
            raise ValueError(
                f"--images_per_row {self.images_per_row}: images of {self.image_tokens:,} tokens in rows of {length:,}"
                f"; give {length // self.image_tokens} or less, or a longer --sequence_length"
            )
        return tokens / length

    def amounts(self, case: Case) -> Amounts:
        """Returns the amounts of a rank for a micro-batch. Raises ValueError if the model cannot be cut like this."""
        key, images, crossing = self._key_of(case)
        if key not in self._amounts:
            count = functools.partial(self._counted, case, images, crossing)
            self._amounts[key] = count() if self._kept is None else self._kept.value(key, count)
        amounts = self._amounts[key]
        if isinstance(amounts, ValueError):
            raise amounts
        return amounts

    def is_counted(self, case: Case) -> bool:
        """Returns whether the amounts of a case are known, of a model that can be cut like this."""
        return isinstance(self._amounts.get(self._key_of(case)[0]), Amounts)

    def of_window(self, case: Case) -> Amounts:
        """Returns the amounts of a rank for the time of a window: coarse ones if no layer communicates, since windows
        of all layers then take as long within 0.1 %. Raises as `amounts`."""
        amounts, sizes = self.amounts(case), case.sizes
        if (
            sizes.tp * sizes.cp * sizes.ep > 1
            or case.spread_weights
            or case.streams_weights
            or case.recompute == OFFLOAD
        ):
            return amounts
        key = self._key_of(case)[0]
        if key not in self._coarse:
            self._coarse[key] = coarse_amounts(amounts)
        return self._coarse[key]

    def answer(self, question: object, case: Case, find: Callable[[], Answer], classes: Iterable[type]) -> Answer:
        """Returns the answer to a question about the model on its cluster, from disk if it was found before.

        Args:
            question: all that the answer depends on besides the model, the cluster and the case; its `repr` counts.
            case: the case; a schedule of its own file is not kept, since the file may change.
            find: finds the answer.
            classes: the classes of the answer's values.
        """
        if self._kept is None or case.config.schedule not in SCHEDULES:
            return find()
        by_name = {each.__name__: each for each in classes}
        key = f"{question!r}, {case!r} of {self.images_per_row} images on {self.cluster!r}"
        return self._kept.value(key, find, by_name)

    def _key_of(self, case: Case) -> tuple[str, int, tuple[str, ...]]:
        """Returns the key of the amounts of a case, the images of its micro-batches, and the axes between nodes."""
        spread, images = case.spread_weights, self.images_per_row * case.batch
        crossing = tuple(inter_node_axes(self.cluster, case.sizes, bool(spread)))
        halves, of_rows = case.config.layers_per_stage is not None, (case.batch, case.length, images)
        ways = case.dtype, case.whole_logits, case.imbalance, self.cluster.backend
        key = case.counted, halves, of_rows, ways, tuple(spread.items()), crossing
        return str(key), images, crossing

    def _counted(self, case: Case, images: int, crossing: tuple[str, ...]) -> Amounts | ValueError:
        try:
            return self._counter.amounts(case, self.cluster.backend, images, crossing)
        except ValueError as error:
            return error
