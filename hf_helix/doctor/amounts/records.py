"""The work and the memory of a rank, as plain data.

In:   the counts of `hf_helix.doctor.amounts.amounts`, or a file of `hf_helix.doctor.amounts.kept`.
Out:  `Amounts`.
Must hold: nothing here imports torch, so that a question about counted amounts needs no torch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from hf_helix.planning.parameters import EXPERTS, Parameter, Place, Ranks, Sharers
from hf_helix.planning.timing.profile import OperatorMemory
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.timing.token_flops import TokenFlops
from hf_helix.planning.traffic import BucketMember, completion
from hf_helix.planning.window.layout import Layout, Name

T = TypeVar("T")
Answer = TypeVar("Answer")

PARAMETER, GRADIENT, STATES = 4, 4, 8
"""Bytes of an element: trained weights and gradients in fp32, and the two states of Adam."""

MATMUL, ATTENTION, OTHER = "matmul", "attention", "other"


@dataclass(frozen=True)
class Kernel:
    """One kernel, or several equal kernels."""

    sort: str  # `MATMUL`, `ATTENTION`, or `OTHER` (bound by memory)
    flops: float  # floating-point operations; a multiplication and an addition count as two
    bytes: int  # bytes read and written
    # of a matrix product, (number of products, rows, columns, depth); of attention, (queries, keys, size of a head)
    sizes: tuple[int, ...] = ()
    exponentials: float = 0.0  # number of values of an exponential or a similar function
    causal: bool = False  # whether attention leaves out the keys after a query
    fp8: bool = False  # whether the factors of a product are in fp8


def of_each(function: Callable[[T], Answer], items: Sequence[T]) -> list[Answer]:
    """Returns the results of a function for kernels or other items; one that a loop repeats is asked about once."""
    results = {key: function(item) for key, item in {id(item): item for item in items}.items()}
    return [results[id(item)] for item in items]


@dataclass(frozen=True)
class Transfer:
    """One use of a transport."""

    axis: str  # "tp", "cp", "experts", "pp", "dp", "copies", "expert_copies" or "host"
    method: str  # a method of the transport; "send" between stages, "all_reduce" of gradients, "up" and "down" of hosts
    bytes: int  # the larger of the bytes sent and received by a rank


@dataclass(frozen=True)
class Storage:
    """Memory left by an operator."""

    bytes: int
    values: tuple[str, ...]  # the values of the operator's unit in this memory
    last: str  # the entry of the unit after which the memory was freed; empty if freed in another unit
    is_weight: bool  # whether the memory holds gathered weights or copies of gathered weights


@dataclass(frozen=True)
class Lifetimes:
    """The memory left by operators."""

    left: Mapping[Name, Sequence[Storage]]
    # for each input of a unit, as (name of the unit, whether forward, index of the input), the entry after which the
    # input was freed
    entering: Mapping[tuple[str, bool, int], str]

    def weights(self) -> dict[Name, int]:
        """Returns, by operator, the change of live bytes of gathered weights, with one strand."""
        changes: dict[Name, int] = {}
        for (unit, entry), storages in self.left.items():
            for storage in storages:
                for name, change in (((unit, entry), 1), ((unit, storage.last), -1)):
                    if storage.is_weight and name[1]:
                        changes[name] = changes.get(name, 0) + change * storage.bytes
        return changes


def outputs_of(layout: Layout, unit: int, values: Collection[str]) -> Iterator[tuple[bool, int]]:
    """Yields the outputs of a unit among some values, as (whether forward, index of the output).

    Args:
        layout: has the graphs of the unit.
        unit: an index.
        values: the names of values.
    """
    pair = layout.graphs[layout.units[unit]]
    for forward, graph in ((True, pair.forward), (False, pair.backward)):
        yield from ((forward, position) for position, name in enumerate(graph.outputs) if name in values)


@dataclass(frozen=True)
class OperatorAmounts(OperatorMemory):
    """The work and the memory of one call of an operator."""

    kernels: Sequence[Kernel] = ()
    transfers: Sequence[Transfer] = ()
    calls: int = 1  # number of operators; several in coarse amounts


@dataclass(frozen=True)
class Weights:
    """The elements of parameters on a rank."""

    trained: int = 0  # trained elements, replicated on all data-parallel ranks
    experts: int = 0  # trained elements of experts, with fewer replicas
    frozen: int = 0  # frozen elements, replicated on all data-parallel ranks
    frozen_experts: int = 0  # frozen elements of experts
    frozen_itemsize: int = 4  # bytes of a frozen element, in the type of the loaded model

    @classmethod
    def of(cls, rows: Iterable[Parameter], place: Place) -> "Weights":
        """Returns the elements of parameters, on the rank with most.

        Args:
            rows: the parameters.
            place: of a rank.
        """
        elements: Counter[tuple[bool, bool]] = Counter()
        itemsize = 0
        for row in rows:
            elements[row.trained, row.cut.mesh_axis == EXPERTS] += row.most_elements(place)
            itemsize = itemsize if row.trained else max(itemsize, row.itemsize)
        return cls(
            trained=elements[True, False],
            experts=elements[True, True],
            frozen=elements[False, False],
            frozen_experts=elements[False, True],
            frozen_itemsize=itemsize or cls.frozen_itemsize,
        )

    @property
    def all_trained(self) -> int:
        """Number of trained elements, with experts."""
        return self.trained + self.experts

    @property
    def all_frozen(self) -> int:
        """Number of frozen elements, with experts."""
        return self.frozen + self.frozen_experts


@dataclass(frozen=True)
class Model:
    """The properties of a model that decide its layouts."""

    name: str
    units: Sequence[str]  # the names of its units in forward order: the embedding, the layers, the head
    head_cost: float  # the work of head and loss relative to a layer
    tower_cost: float  # the work of a tower relative to a layer, if all tokens are of images
    first_least: int  # the fewest layers of the first pipeline stage
    tied: bool  # whether embedding and head share weights, and so need the same rank of a pipeline
    flops: TokenFlops

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.units) - 2


@dataclass(frozen=True)
class Amounts:
    """The work and the memory of a rank for a micro-batch."""

    model: Model
    layout: Layout  # the counted units, one of each name
    operators: Mapping[Name, OperatorAmounts]  # amounts by operator, in the order of one strand
    # of the counted units, in their order; in flat parameters as if replicas sharded them
    parameters: Sequence[Parameter]
    cut_over: Mapping[str, int]  # number of ranks by the axis of a cut
    handed_on: int  # bytes of the values handed from a unit to the next
    copies: Mapping[str, int]  # bytes of cast weights held during a window, by name of the unit
    lifetimes: Lifetimes
    # number of ranks by axis over which weights are sharded; empty with full weights on every rank
    spread: Mapping[str, int] = field(default_factory=dict)
    handed_over: int = 0  # bytes of the values handed from a slice of the head to the next

    @cached_property
    def weights(self) -> dict[str, Weights]:
        """The elements of the parameters of each unit, by its name. Parameters of several units count in the first:
        tied weights of a head count in the embedding."""
        rows = self._by_unit(self.parameters)
        return {name: Weights.of(rows.get(name, ()), self.counted_place) for name in self.layout.units}

    @cached_property
    def _by_completion(self) -> dict[str, list[Parameter]]:
        """The trained parameters by the name of the first unit with them, which completes their gradients, in the order
        of completion."""
        rows = [row for row in self.parameters if row.trained]
        backward = {unit: self.layout.graphs[name].backward for unit, name in enumerate(self.layout.units)}
        return self._by_unit([rows[number] for number in completion(rows, backward)])

    def _by_unit(self, rows: Iterable[Parameter]) -> dict[str, list[Parameter]]:
        """Returns parameters by the name of the first unit with them."""
        found: dict[str, list[Parameter]] = {}
        for row in rows:
            found.setdefault(self.layout.units[row.units[0]], []).append(row)
        return found

    @cached_property
    def counted_place(self) -> Place:
        """The place of the counted rank. A case may shard gradients over other ranks, see `Case.place`."""
        axes: dict[str, Sharers] = {}
        for axis, size in self.cut_over.items():
            replicas = Ranks(self.spread.get(copies_axis(axis), 1))
            axes[axis] = Sharers(Ranks(size), replicas, replicas)
        return Place(axes)

    def completed_gradients(
        self, layout: Layout, rank: int, place: Place, on_host: bool = False
    ) -> list[tuple[Parameter, BucketMember]]:
        """Returns the gradients of a pipeline rank that other ranks add to, or the host takes, in the order of
        completion: the counted parameter, and the gradient with the units of a layout.

        Args:
            layout: of all units.
            rank: of the pipeline.
            place: of any rank of the pipeline.
            on_host: whether the host has optimizer states.
        """
        counted: dict[str, list[tuple[Parameter, BucketMember]]] = {}
        for name, rows in self._by_completion.items():
            found = ((row, _in_fp32(row, place, on_host)) for row in rows)
            counted[name] = [(row, member) for row, member in found if member is not None]
        gradients = []
        for unit in reversed(layout.units_of(rank)):
            at = self.units_in(layout, unit)
            gradients += [(row, member.in_layout(at)) for row, member in counted.get(layout.units[unit], ())]
        return gradients

    def units_in(self, layout: Layout, unit: int) -> Callable[[int], int]:
        """Returns a function from a counted unit to its index in a layout, for parameters whose first unit is `unit`
        there. Further units with a parameter (of shared weights) have names that occur once on a pipeline rank."""
        name, own = layout.units[unit], layout.units_of(layout.rank_of(unit))

        def index(counted: int) -> int:
            other = self.layout.units[counted]
            return unit if other == name else next(each for each in own if layout.units[each] == other)

        return index


def copies_axis(axis: str) -> str:
    """Returns the axis of the replicas of parameters that are cut over an axis."""
    return EXPERT_COPIES if axis == EXPERTS else COPIES


def _in_fp32(row: Parameter, place: Place, on_host: bool) -> BucketMember | None:
    """Returns the gradient of a parameter, in fp32 whatever its type, and in a flat parameter only if ranks shard it or
    the host has its states."""
    is_sharded = on_host or place.sharers(row.cut.mesh_axis).shards.size > 1
    return BucketMember.of(replace(row, itemsize=GRADIENT, flat=row.flat if is_sharded else None), place)


@dataclass(frozen=True)
class Facts:
    """The properties of a model that a search of layouts asks for."""

    name: str  # its class
    layers: int
    experts: int  # of a layer; 1 for a dense model
    positions: int | None  # the rows of its table of positions; None without a table
    image_tokens: int  # the tokens of an image; 0 without a tower whose work can be counted
    without_images: str  # why a tower is not counted
    digest: str  # of its parameters, see `hf_helix.tuning.cache.model_digest`
    trained: int  # elements of its trained parameters
