"""Flats whose pieces are gathered in the type of matrix products, while the parts that are stepped stay in fp32."""

import weakref

import pytest
import torch
from support.units import unit_of
from torch import Tensor, nn

from hf_helix.operators.base import OperatorContext, Precision, explicit_gradients
from hf_helix.operators.communication.transport import Axis, Recorder, ReplicaAxes, SilentTransport
from hf_helix.operators.linears.linear import Linear
from hf_helix.operators.matmul_dtype import CastWeights
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.zero.grouping import make_flat_parameters
from hf_helix.operators.zero.zero1 import Zero1FlatParameter
from hf_helix.operators.zero.zero3 import casts_of, with_unsharded
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.parameters import COPIED

RANKS = 2
BF16 = torch.bfloat16


class Board(SilentTransport):
    """All ranks in one process: each puts on the board what it sends, and takes what lies there by then."""

    def __init__(self, rank: int, board: dict[int, Tensor]) -> None:
        super().__init__(RANKS, rank)
        self._board = board

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        self._board[self.rank] = value.clone()
        for rank, sent in self._board.items():
            out.chunk(self.size)[rank].copy_(sent)


def linears() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(32, size) for size in (16, 8)]


def ranks_of(
    kind: type[FlatParameter] = FlatParameter, cast_to: torch.dtype | None = BF16
) -> list[tuple[list[nn.Linear], FlatParameter]]:
    """Every rank's linears, in a flat, with a transport that notes what is sent."""
    board: dict[int, Tensor] = {}
    result = []
    for rank in range(RANKS):
        modules = linears()
        axis = Axis(Recorder(Board(rank, board)))
        parameters = [module.weight for module in modules] + [module.bias for module in modules]
        flat = kind("weights.products", dict.fromkeys(parameters, COPIED), axis, axis, cast_to)
        flat.shard_in_place(torch.device("cpu"))
        result.append((modules, flat))
    return result


def gathered(ranks: list[tuple[list[nn.Linear], FlatParameter]]) -> list[Tensor]:
    """The piece of every rank."""
    prepared = [flat.prepare_gather() for _, flat in ranks]
    for _ in range(RANKS):  # the first time, not all is on the board
        for _, work in prepared:
            work()
    return [piece for piece, _ in prepared]


@pytest.mark.parametrize("kind", [FlatParameter, Zero1FlatParameter])
def test_checkpoints_have_the_parts_that_are_stepped(kind: type[FlatParameter]) -> None:
    ranks = ranks_of(kind)
    for _ in range(RANKS):
        wholes = [flat.gather() for _, flat in ranks]
    for (modules, flat), whole in zip(ranks, wholes, strict=True):
        assert whole.dtype is torch.float32
        flat.unshard(whole)
        for module, other in zip(modules, linears(), strict=True):
            assert torch.equal(module.weight, other.weight)
            assert torch.equal(module.bias, other.bias)
            assert flat.cast(module.weight) is None or kind is Zero1FlatParameter
        flat.reshard()
        assert all(parameter.isnan().all() for parameter in flat.placements)


def run(operator: Linear, precision: Precision, unsharded: list[tuple[FlatParameter, Tensor]]) -> list[Tensor]:
    """Outputs and input gradient of a micro-batch, and the gradients of the parameters."""
    ctx, value = OperatorContext({}, 0, True, precision), torch.randn(5, 32, generator=torch.Generator().manual_seed(1))

    def method(part: Part) -> object:
        return with_unsharded(operator.method_of(part), unsharded) if unsharded else operator.method_of(part)

    with explicit_gradients():
        outputs = method(Part.F)(ctx, value)
        gradients = [torch.ones_like(output) for output in outputs]
        inputs = method(Part.I)(ctx, *gradients)
        operator.method_of(Part.W)(ctx, *gradients, value)
    return [*outputs, *inputs, *(parameter.grad for parameter in operator.parameters)]


def test_products_read_the_piece_and_its_bits() -> None:
    """Of linears that read one value, the matrices are one view of it: nothing is copied, and nothing rounded twice."""
    plain = Precision("cpu", BF16)
    with plain.weights.kept():
        expected = run(Linear(linears()), plain, [])
    ranks = ranks_of()
    for (modules, flat), piece in zip(ranks, gathered(ranks), strict=True):
        precision = Precision("cpu", BF16, CastWeights(casts_of([flat])))
        with precision.weights.kept():
            result = run(Linear(modules), precision, [(flat, piece)])
        for mine, theirs in zip(result, expected, strict=True):
            assert mine.dtype is theirs.dtype
            assert torch.equal(mine, theirs)
        assert all(parameter.isnan().all() for parameter in flat.placements), "they stay stand-ins"
        flat.unshard(piece)
        with precision.weights.kept():
            matrix = precision.weights.of([module.weight for module in modules], BF16)
        assert matrix.untyped_storage()._cdata == piece.untyped_storage()._cdata


def test_a_piece_is_freed_with_its_last_reader() -> None:
    """What operators keep of it does not keep it."""
    ranks = ranks_of()
    pieces = gathered(ranks)
    modules, flat = ranks[0]
    precision = Precision("cpu", BF16, CastWeights(casts_of([flat])))
    piece = pieces[0]
    del pieces
    with precision.weights.kept():
        run(Linear(modules), precision, [(flat, piece)])
        flat.reshard(piece)
        left = weakref.ref(piece)
        del piece
        assert left() is None


def test_what_is_lent_is_not_taken_away() -> None:
    """Such as by a window, while somebody uses the model with all weights in it."""
    for kind in (FlatParameter, Zero1FlatParameter):
        ((_, flat), _) = ranks_of(kind, cast_to=None)
        flat.unshard(flat.gather())
        with pytest.raises(RuntimeError, match="leave full_weights\\(\\) before you train"):
            flat.begin_window()
        flat.reshard()
        flat.begin_window()


def test_flats_of_a_unit_have_names_of_their_own() -> None:
    """The last unit shares one parameter with the first, and another with the second."""
    left, right = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    units = [unit_of(dict.fromkeys(held, COPIED)) for held in ([left], [right], [left, right])]
    axis = Axis(SilentTransport(RANKS, 0))
    flats = make_flat_parameters(units, lambda placement: ReplicaAxes(axis, axis), None, FlatParameter)
    names = [[flat.name for flat in result] for result in flats]
    assert names == [["weights.shared"], ["weights.shared.2"], ["weights.shared", "weights.shared.2"]]
    assert flats[2] == [flats[0][0], flats[1][0]]
