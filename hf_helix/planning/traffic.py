"""The traffic of parameters: gradients and weights between ranks, or between a device and its host.

In:   the trained parameters of a pipeline rank, in the order in which a single micro-batch completes their gradients.
Out:  buckets of gradients that travel together; `Traffic`, with the operators that move gradients or weights.
Must hold: runtime and doctor make the same buckets from the same rows. Traffic is communication like any other: plans
order it, clocks time it, the executor issues it. It has no values of a micro-batch, so it is in no graph of a unit.

    option               gradients, after the last addition      weights, before the first reader
    data parallelism     sum
    shard_optimizer      sum (reduce-scatter)                    gather
    offload="optimizer"  sum, down                               up, gather
    shard_parameters     sum (reduce-scatter)                    operators of the units, see `operators.zero.zero3`

A sum runs once a window, or for every micro-batch (`reduce_gradients="microbatch"`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hf_helix.planning.graph.operator import Graph, Kind, Operator, Part
from hf_helix.planning.parameters import TP, Adder, Parameter, Place

GRADIENTS, WEIGHTS = "gradients", "weights"
"""The first part of the names of traffic operators, where other operators have the name of their unit."""

GATHER_COST = 8.0
"""A rough relative time of a weight gather, until the gather is measured; a norm has 1."""

BUCKET_BYTES = 25 * 2**20
SMALLEST_BYTES = 2**20
"""Below this size a collective takes its latency: smaller buckets gain nothing."""

TAIL = 4
"""The buckets that share the last bytes of a window, see `fill_buckets`."""


@dataclass(frozen=True)
class BucketMember:
    """A trained parameter, for the buckets of gradients.

    Attributes:
        bytes: of its gradient, on the rank with most.
        adders: the operators that add to its gradient, in the order of a micro-batch's backward.
        spans_batches: whether ranks with other tokens (dp, cp) add to it, or the host takes it. If not, only tensor
            parallelism reduces it, after the window.
        flat: its flat parameter, as the first unit and the name there; None if every replica steps the full parameter.
        is_sharded: whether several replicas step a shard of the flat parameter each.
    """

    bytes: int
    adders: tuple[Adder, ...]
    spans_batches: bool = True
    flat: tuple[int, str] | None = None
    is_sharded: bool = False

    @classmethod
    def of(cls, row: Parameter, place: Place) -> "BucketMember | None":
        """Returns the member of a parameter, for the axes of a place; None if no other rank adds to the gradient, no
        number of batches divides it, and no host takes it.

        Args:
            row: the parameter.
            place: of any rank of the pipeline.
        """
        sharers, size = place.sharers(row.cut.mesh_axis), row.itemsize * row.most_elements(place)
        if row.flat is not None:
            is_sharded = sharers.shards.size > 1
            return cls(size, row.adders, flat=(row.units[0], row.flat.name), is_sharded=is_sharded)
        spans_batches = sharers.replicas.size > 1
        over_tp = row.cut.sums_gradient and place.sharers(TP).slices.size > 1
        is_reduced = over_tp or spans_batches or place.num_batches > 1
        return cls(size, row.adders, spans_batches) if is_reduced else None

    def in_layout(self, unit: Callable[[int], int]) -> "BucketMember":
        """Returns the member for a layout with other units.

        Args:
            unit: from a unit of this member to its index in the other layout.
        """
        adders = tuple((unit(index), name) for index, name in self.adders)
        flat = None if self.flat is None else (unit(self.flat[0]), self.flat[1])
        return BucketMember(self.bytes, adders, self.spans_batches, flat, self.is_sharded)


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        members: the numbers of its gradients, among those that `gradient_buckets` was given.
        adders: the operators that add to the gradients, all on one pipeline rank.
        bytes: of the gradients, on the rank with most.
        spans_batches: see `BucketMember`, for any of them.
        can_reduce_often: whether a reduction in every micro-batch saves memory: the gradients are sharded, and a single
            unit adds to them. A tied table's full gradient lives through the whole backward pass anyway, since units
            add to it at the begin and at the end.
    """

    members: tuple[int, ...]
    adders: tuple[Adder, ...]
    bytes: int
    spans_batches: bool = True
    can_reduce_often: bool = False

    @property
    def is_planned(self) -> bool:
        """Whether a plan orders the reduction."""
        return self.spans_batches and bool(self.adders)


@dataclass(frozen=True)
class FlatWeights:
    """Weights of ZeRO-1: replicated on every rank, with a shard stepped by each replica (`shard_optimizer`).

    Attributes:
        readers: the units with these weights, all on one pipeline rank.
        name: of the flat parameter, unique among those of these units.
        bytes: of the weights, on the rank with most.
    """

    readers: tuple[int, ...]
    name: str
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """Gradients or weights that travel together.

    Attributes:
        unit: stands for a unit in instructions: an index after those of the layout's units.
        operators: in order, each after the one before.
        bytes: of the gradients or weights, on the rank with most.
        adders: of gradients, see `Bucket`; the first operator follows the last of them.
        readers: of weights, see `FlatWeights`; their first computation follows the last operator.
        every_microbatch: whether the first operator also runs for every micro-batch before the last.
    """

    unit: int
    operators: tuple[Operator, ...]
    bytes: int
    adders: tuple[Adder, ...] = ()
    readers: tuple[int, ...] = ()
    every_microbatch: bool = False

    @property
    def name(self) -> str:
        """The first part of its operators' names."""
        return GRADIENTS if self.adders else WEIGHTS

    @property
    def named_operators(self) -> list[tuple[tuple[str, str], Operator]]:
        """Its operators, each with its name in a profile."""
        return [((self.name, f"{'F' if op.part is Part.F else 'B'}.{op.name}"), op) for op in self.operators]

    @property
    def home(self) -> int:
        """A unit of its pipeline rank."""
        return self.adders[0][0] if self.adders else self.readers[0]


def completion(rows: Sequence[Parameter], backward: Mapping[int, Graph]) -> list[int]:
    """Returns the indices of rows in the order in which a single micro-batch would complete their gradients.

    Args:
        rows: in the order of their units; rows of other units are left out.
        backward: the backward graphs of units, by index in the layout.
    """
    order: dict[Adder, int] = {}
    for unit in sorted(backward, reverse=True):
        for op in backward[unit].operators:
            order[unit, op.name] = len(order)
    found: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows):
        units = [unit for unit in row.units if unit in backward]
        if units:
            last = max((order[adder] for adder in row.adders if adder in order), default=len(order))
            found.append((last, -max(units), number))
    return [number for *_, number in sorted(found)]


def gradient_buckets(gradients: Sequence[BucketMember]) -> list[Bucket]:
    """Returns the buckets of a pipeline rank in the order in which a single micro-batch completes them.

    A flat parameter is a bucket. Buckets depend neither on a plan nor on this rank's slices: sums have the same bits
    under every plan, and every rank knows the buckets of the others.
    """
    full = [number for number, each in enumerate(gradients) if each.flat is None]
    filled = fill_buckets([gradients[number].bytes for number in full], BUCKET_BYTES)
    bucket_of = dict(zip(full, filled, strict=True))
    groups: dict[tuple[int, str] | int, list[int]] = {}
    for number, each in enumerate(gradients):
        key = each.flat or bucket_of[number]
        groups[key] = [*groups.pop(key, ()), number]  # moved to the end: complete with its last gradient
    return [_bucket(gradients, members) for members in groups.values()]


def _bucket(gradients: Sequence[BucketMember], members: Sequence[int]) -> Bucket:
    chosen = [gradients[number] for number in members]
    adders = tuple(dict.fromkeys(adder for each in chosen for adder in each.adders))
    spans_batches = any(each.spans_batches for each in chosen)
    is_within_unit = chosen[0].is_sharded and len({unit for unit, _ in adders}) == 1
    return Bucket(tuple(members), adders, sum(each.bytes for each in chosen), spans_batches, is_within_unit)


def fill_buckets(sizes: Sequence[int], largest: int) -> list[int]:
    """Returns the bucket of each gradient, numbered from 0.

    The last reduction of a window is exposed. So when fewer than `TAIL` buckets are left, each bucket takes a part of
    1 / `TAIL` of the remaining bytes.

    Args:
        sizes: bytes of the gradients, in the order in which a single micro-batch completes the gradients.
        largest: bytes of a bucket at most; a larger gradient gets a bucket of its own.
    """
    left = sum(size for size in sizes if size <= largest)
    buckets: list[int] = []
    number, filled, limit = -1, 0, 0
    for size in sizes:
        if not buckets or filled + size > limit:
            number, filled, limit = number + 1, 0, min(largest, max(SMALLEST_BYTES, left // TAIL))
        buckets.append(number)
        filled += size
        left -= size if size <= largest else 0
    return buckets


def traffic_of(
    buckets: Sequence[Bucket],
    weights: Sequence[FlatWeights],
    first: int,
    costs: Sequence[float],
    on_host: bool = False,
    often: bool = False,
) -> list[Traffic]:
    """Returns the traffic of buckets, then of weights.

    Args:
        buckets: the planned ones of all pipeline ranks.
        weights: of all pipeline ranks; those of a rank in the order in which a micro-batch first reads them.
        first: the unit of the first, see `Traffic.unit`.
        costs: rough relative times of the sums, until these are measured.
        on_host: whether weights and optimizer states lie on the host.
        often: whether sharded gradients are reduced for every micro-batch.
    """
    traffic: list[Traffic] = []
    for number, (bucket, cost) in enumerate(zip(buckets, costs, strict=True)):
        add = _moving("sum", number, Part.B, cost)
        copies = (replace(add, name=f"down.{number}", kind=Kind.DOWN),) if on_host else ()
        repeats = often and bucket.can_reduce_often
        traffic.append(Traffic(first + len(traffic), (add, *copies), bucket.bytes, bucket.adders, (), repeats))
    for number, flat in enumerate(weights):
        gather = replace(_moving("gather", number, Part.F, GATHER_COST), forward_name=flat.name)
        copies = (replace(gather, name=f"up.{number}", kind=Kind.UP),) if on_host else ()
        traffic.append(Traffic(first + len(traffic), (*copies, gather), flat.bytes, (), flat.readers))
    return traffic


def flat_weights(rows: Iterable[Parameter], place: Place) -> list[FlatWeights]:
    """Returns the weights that every replica keeps, in the order of their first readers.

    Args:
        rows: parameters of any pipeline ranks, in the order of their units.
        place: of a rank.
    """
    found: dict[tuple[tuple[int, ...], str], int] = {}
    for row in rows:
        if row.flat is not None and row.flat.is_kept:
            key = row.units, row.flat.name
            found[key] = found.get(key, 0) + row.flat.itemsize * row.most_elements(place)
    return [FlatWeights(units, name, size) for (units, name), size in found.items()]


def _moving(verb: str, number: int, part: Part, cost: float) -> Operator:
    """Returns the operator between ranks of a bucket or of weights."""
    return Operator(name=f"{verb}.{number}", kind=Kind.GRADIENTS, reads=(), writes=(), part=part, relative_cost=cost)
