"""The work and the memory of a rank, as plain data.

In:   the counts of `hf_helix.doctor.amounts.amounts`, or a file of `hf_helix.doctor.amounts.kept`.
Out:  `Amounts`.
Must hold: nothing here imports torch, so that a question about counted amounts needs no torch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hf_helix.planning.timing.profile import OperatorMemory
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES
from hf_helix.planning.timing.token_flops import TokenFlops
from hf_helix.planning.window.layout import Layout, Name

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


Adders = tuple[tuple[int, str], ...]  # operators of backward that add to a gradient, as (unit, name)


@dataclass(frozen=True)
class OperatorAmounts(OperatorMemory):
    """The work and the memory of one call of an operator."""

    kernels: Sequence[Kernel] = ()
    transfers: Sequence[Transfer] = ()
    calls: int = 1  # number of operators; several in coarse amounts


@dataclass(frozen=True)
class Weights:
    """The numbers of elements in the parameters of a unit on a rank.

    Shared parameters count in the first unit only: tied weights of a head count in the embedding.
    """

    trained: int = 0  # trained elements, replicated on all data-parallel ranks
    experts: int = 0  # trained elements of experts, with fewer replicas
    frozen: int = 0  # frozen elements, replicated on all data-parallel ranks
    frozen_experts: int = 0  # frozen elements of experts
    frozen_itemsize: int = 4  # bytes of a frozen element, in the type of the loaded model

    @property
    def all_trained(self) -> int:
        """Number of trained elements, with experts."""
        return self.trained + self.experts

    @property
    def all_frozen(self) -> int:
        """Number of frozen elements, with experts."""
        return self.frozen + self.frozen_experts


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter on a rank."""

    # the operators of backward that add to the gradient, as (name of the unit, name of the operator)
    adders: tuple[tuple[str, str], ...]
    elements: int
    is_experts: bool  # whether the parameter is of experts, with fewer replicas
    flat: str  # the name of the parameter's flat buffer under ZeRO; empty without a buffer


@dataclass(frozen=True)
class KeptWeights:
    """Weights in one flat buffer of ZeRO-1 (`shard_optimizer`): full on every replica, each updating a shard."""

    units: tuple[str, ...]  # names of the units that read the buffer
    name: str  # unique within these units
    elements: int
    element_bytes: int  # bytes of an element in the gathered type
    is_experts: bool  # whether the weights are of experts, with fewer replicas
    is_cast: bool = False  # whether trained and gathered types differ

    @property
    def bytes(self) -> int:
        """Bytes of the buffer, without padding."""
        return self.elements * self.element_bytes

    @property
    def axis(self) -> str:
        """The axis of the replicas with these weights."""
        return EXPERT_COPIES if self.is_experts else COPIES


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
    weights: Mapping[str, Weights]
    handed_on: int  # bytes of the values handed from a unit to the next
    copies: Mapping[str, int]  # bytes of cast weights held during a window, by name of the unit
    # by name of the unit that completes the gradients, in order of completion
    gradients: Mapping[str, Sequence[Gradient]]
    lifetimes: Lifetimes
    kept: Sequence[KeptWeights] = ()  # the flat buffers of ZeRO-1; empty with sharded weights
    # number of ranks by axis over which weights are sharded; empty with full weights on every rank
    spread: Mapping[str, int] = field(default_factory=dict)
    handed_over: int = 0  # bytes of the values handed from a slice of the head to the next

    def completed_gradients(self, layout: Layout, rank: int) -> Iterator[tuple[Gradient, Adders]]:
        """Yields the gradients of a pipeline rank in order of completion, each with its adders."""
        own = {layout.units[unit]: unit for unit in layout.units_of(rank)}
        for unit in reversed(layout.units_of(rank)):
            for made in self.gradients.get(layout.units[unit], ()):
                # Gradients with adders in two units belong to weights shared by embedding and head, of one name each.
                yield made, tuple((unit if name == layout.units[unit] else own[name], op) for name, op in made.adders)


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
