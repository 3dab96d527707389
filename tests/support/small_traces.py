"""Small modules, derived as a decoder layer is: their trace, placements and unit, and their gradients on two ranks."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from support.rank_threads import Meeting, ThreadTransport, on_ranks
from support.units import run_units
from torch import Tensor, nn

from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.lowering.lower import Lowering
from hf_helix.models.lowering.segment_function import Share
from hf_helix.models.lowering.segment_plan import SegmentPlan
from hf_helix.models.placement.inference import infer_placements
from hf_helix.models.placement.rules import Placements
from hf_helix.models.placement.value_placement import SHARD, NeedsInlining, ValuePlacement
from hf_helix.models.trace.opaque_calls import DTYPE, OpaqueCalls, skeleton_of
from hf_helix.models.trace.trace import EXAMPLE_BATCH, EXAMPLE_LENGTH, Given, ModuleTrace, trace
from hf_helix.operators.communication.collectives import AllGather, ReduceScatter
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.parameters.parts import cut_tensor, paste
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.parameters import Cut

WIDTH = 8
"""Features of what enters the modules."""


def traced(module: nn.Module, given: Sequence[Given] = (), inlined: frozenset[str] = frozenset()) -> ModuleTrace:
    """The trace of a module that is called with [batch, sequence, WIDTH] and, behind it, what it is given.

    It is made once for each module, so a test that changes what is traced takes another module.
    """
    return _traced(module, tuple(given), inlined)


@functools.lru_cache(maxsize=16)
def _traced(module: nn.Module, given: tuple[Given, ...], inlined: frozenset[str]) -> ModuleTrace:
    opaque_calls, skeleton = OpaqueCalls(inlined), skeleton_of(module).train()
    opaque_calls.replace(skeleton)
    hidden = torch.empty((EXAMPLE_BATCH, EXAMPLE_LENGTH, WIDTH), dtype=DTYPE, device="meta")
    return trace(skeleton, opaque_calls, hidden, given, lambda called, x, more: (called(x, *more), None))


def inferred(module: nn.Module, given: Sequence[Given] = (), size: int = 2) -> Placements:
    """The placements of a module's values, traced through the norms that this needs."""
    inlined: frozenset[str] = frozenset()
    while True:
        try:
            return infer_placements(traced(module, given, inlined), size, ValuePlacement(SHARD))
        except NeedsInlining as needed:
            inlined |= {needed.path}


def styles(placements: Placements) -> dict[str, str]:
    """How every linear is cut, by its path."""
    return {placements.trace.path_of(node): style for node, style in placements.decisions.styles.items()}


def placement_of(placements: Placements, operation: str) -> ValuePlacement:
    """The placement of what the last call of an operation gives: a part of its name."""
    return next(placements.of(node) for node in reversed(placements.trace.nodes) if operation in str(node.target))


def unit_of(module: nn.Module, given: Sequence[Given] = (), axis: Axis | None = None) -> Unit:
    """The unit of a module on one rank, the first of two by default."""
    axis = axis or Axis(SilentTransport(2, 0))
    return lowered(inferred(module, given, axis.size), module, axis)


def lowered(placements: Placements, module: nn.Module, axis: Axis) -> Unit:
    """The unit on one rank of a module that was traced, or of a copy of it."""
    graph = placements.trace
    plan = SegmentPlan(placements, Share(axis.size, axis.rank), [graph.hidden], graph.result)
    b = Builder("layer", "layers.0", ParallelContext(axis))
    return b.build(Lowering(plan, b, module, {graph.hidden: b.input("x")}).run())


def steps(unit: Unit) -> list[str]:
    """The operators of a unit in order; collectives by what they do."""
    kinds = {AllGather: "gather", ReduceScatter: "scatter"}
    return [kinds.get(type(unit.operators[op.name]), op.name) for op in unit.graphs.forward.operators]


def gradients_whole(module: nn.Module, x: Tensor, gradient: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """What a module gives for x [batch, tokens, WIDTH], and all gradients."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    out = module(x, *given.values())
    out.backward(gradient)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"out": out.detach(), "d.x": x.grad, **grads}


def gradients_cut(module: nn.Module, x: Tensor, gradient: Tensor, size: int = 2, **given: Tensor) -> dict[str, Tensor]:
    """The same from ranks that each hold a part, made whole again."""
    meeting = Meeting(size)
    examples = [Given(name, (*value.shape,), value.dtype, (0, 1)) for name, value in given.items()]
    modules = [copy.deepcopy(module) for _ in range(size)]
    units = [
        lowered(inferred(module, examples, size), each, Axis(ThreadTransport(meeting, rank)))
        for rank, each in enumerate(modules)
    ]
    for rank, unit in enumerate(units):
        for parameter, cut in unit.placements.items():
            parameter.data = cut_tensor(parameter.data, cut, size, rank)
    side: dict[str, Any] = {**given, "masks": {None: None}, "positions": torch.arange(x.shape[1])[None], "ends": {}}
    side["length"] = x.shape[1]
    parts = [[value.transpose(0, 1).chunk(size)[rank] for value in (x, gradient)] for rank in range(size)]
    runs = on_ranks(meeting, lambda rank: run_units([units[rank]], parts[rank][:1], side, parts[rank][1:]))
    out, entering = ([torch.cat([run[place][0] for run in runs]).transpose(0, 1)] for place in (0, 1))
    return {"out": out[0], "d.x": entering[0], **whole_gradients(modules, units[0].placements)}


def whole_gradients(modules: Sequence[nn.Module], cuts: Mapping[nn.Parameter, Cut]) -> dict[str, Tensor]:
    """The gradients of all parameters from the parts of the ranks.

    Args:
        modules: of each rank.
        cuts: of the parameters of the first.
    """
    result = {}
    for name, first in modules[0].named_parameters():
        cut = cuts[first]
        parts = [module.get_parameter(name).grad for module in modules]
        if cut.dim is not None:
            whole = torch.empty(cut.full_shape(parts[0].shape))
            for rank, part in enumerate(parts):
                paste(whole, part, cut, len(parts), rank)
            result[name] = whole
        elif cut.sums_gradient:
            result[name] = sum(parts[1:], start=parts[0])
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            result[name] = parts[0]
    return result


def check_on_two_ranks(module: nn.Module, length: int = 6, **given: Tensor) -> None:
    """Asserts that two ranks give what the module gives, with all gradients."""
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * (parameter.shape[-1] ** -0.5))
    x = torch.randn(2, length, WIDTH, generator=dice)
    gradient = torch.randn(module(x, *given.values()).shape, generator=dice)
    expected = gradients_whole(module, x, gradient, **given)
    result = gradients_cut(module, x, gradient, **given)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        torch.testing.assert_close(
            result[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
