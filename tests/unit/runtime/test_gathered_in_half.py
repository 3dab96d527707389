"""Weights that products read are gathered in bfloat16 and change no bit: windows through the executor, in one process.

One rank has all of every flat, so that gradients are those of whole weights without a sum over ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_helix.operators.base import Call, Computation, Precision, Tensors
from hf_helix.operators.communication.transport import Axis, Recorder, ReplicaAxes, SilentTransport
from hf_helix.operators.linears.linear import Linear
from hf_helix.operators.matmul_dtype import CastWeights
from hf_helix.operators.param_shard import COPIED
from hf_helix.operators.unit import Unit
from hf_helix.operators.zero.zero1 import apply_zero1, zero1_flat_parameters
from hf_helix.operators.zero.zero3 import apply_zero3, casts_of
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.window.program import build_program
from hf_helix.runtime.executor import Executor
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.stage import place_units
from hf_helix.runtime.streams import make_streams

WIDTH, SIZES, COUNT = 32, (48, 48), 3
CPU = torch.device("cpu")


class Scale(Computation):
    """Every feature times a weight, in fp32; of the micro-batch itself where it reads no value."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        call.saved = inputs[0] if inputs else call.side["x"]
        return (call.saved.float() * self.weight,)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        result = (gradients[0].float() * call.saved).sum((0, 1))
        self.weight.grad = result if self.weight.grad is None else self.weight.grad.add_(result)
        return ((gradients[0].float() * self.weight).to(call.saved.dtype),)


class Start(Scale):
    """The first unit, which has no input gradient."""

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        super().backward(call, *gradients)
        return ()


class Product(Computation):
    """Two values multiplied."""

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        call.saved = inputs
        return (inputs[0] * inputs[1],)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        a, b = call.saved
        return gradients[0] * b, gradients[0] * a


class Loss(Computation):
    """The sum of squares of two values."""

    def forward(self, call: Call, *inputs: Tensor) -> Tensors:
        call.saved = [value.float() for value in inputs]
        return (torch.stack([value.square().sum() for value in call.saved]).sum(),)

    def backward(self, call: Call, *gradients: Tensor) -> Tensors:
        return tuple((2 * gradients[0] * value).bfloat16() for value in call.saved)


def compute(name: str, reads: str, writes: str, **traits: Any) -> Operator:
    return Operator(name=name, kind=Kind.COMPUTE, reads=tuple(reads.split()), writes=tuple(writes.split()), **traits)


def model() -> tuple[list[Unit], dict[str, nn.Parameter]]:
    """A table, two layers and a head, with their parameters by name."""
    torch.manual_seed(0)
    parameters: dict[str, nn.Parameter] = {}

    def scale(name: str, kind: type[Scale] = Scale) -> Scale:
        parameters[name] = nn.Parameter(torch.randn(WIDTH))
        return kind(parameters[name])

    def linear(name: str, *sizes: int, width: int = WIDTH) -> Linear:
        modules = [nn.Linear(width, size) for size in sizes]
        for place, module in enumerate(modules):
            parameters[f"{name}.{place}.weight"], parameters[f"{name}.{place}.bias"] = module.weight, module.bias
        return Linear(modules)

    def unit(label: str, name: str, graph: Graph, operators: dict[str, Any]) -> Unit:
        held = [p for operator in operators.values() for p in operator.parameters]
        return Unit(
            label=label, graphs=GraphPair.of(graph), operators=operators, placements=dict.fromkeys(held, COPIED)
        )

    start = Graph("embedding", (compute("start", "", "x"),), (), ("x",))
    units = [unit("embedding", "embedding", start, {"start": scale("table", Start)})]
    for place in range(2):
        norm, up = compute("norm", "x", "n"), compute("up", "n", "a b", splits_dgrad_wgrad=True)
        product, down = compute("product", "a b", "p"), compute("down", "p", "y", splits_dgrad_wgrad=True)
        graph = Graph("layer", (norm, up, product, down), ("x",), ("y",), repeats=True)
        operators: dict[str, Any] = {"norm": scale(f"{place}.norm"), "up": linear(f"{place}.up", *SIZES)}
        operators["product"] = Product()
        operators["down"] = linear(f"{place}.down", WIDTH, width=SIZES[0])
        units.append(unit(f"layers.{place}", "layer", graph, operators))
    logits, loss = compute("logits", "x", "a b", splits_dgrad_wgrad=True), compute("loss", "a b", "loss")
    head = Graph("head", (logits, loss), ("x",), ("loss",))
    units.append(unit("head", "head", head, {"logits": linear("head", *SIZES), "loss": Loss()}))
    return units, parameters


def window(sharded: str, plan: str = "sequential") -> tuple[list[Tensor], dict[str, Tensor], Recorder]:
    """The losses and gradients of a window of three micro-batches, and what went over the axis of weights.

    Args:
        sharded: "parameters", "optimizer", or nothing.
        plan: its name.
    """
    units, parameters = model()
    recorder = Recorder(SilentTransport(1, 0))
    over = ReplicaAxes(Axis(recorder), Axis(SilentTransport(1, 0)))
    ways = {"parameters": apply_zero3, "optimizer": apply_zero1}
    if sharded:
        units = ways[sharded](units, lambda _: over, torch.bfloat16)
    stage = place_units(units)
    for flat in stage.flat_parameters:
        flat.shard_in_place(CPU)
        assert flat.shard.dtype is torch.float32
        assert all(parameter.isnan().all() for parameter in flat.placements)
    for flat in zero1_flat_parameters(stage.flat_parameters):
        flat.refresh()()
    precision = Precision("cpu", torch.bfloat16, CastWeights(casts_of(stage.flat_parameters)))
    executor = Executor(stage.units, make_streams(CPU), 0, precision)
    made = make_plan(plan, rough_profile(stage.layout), model="by hand", mesh={"tp": 1})
    loss = stage.head, "loss"
    program = build_program(Scheduler("folded_1f1b", 1)(COUNT), stage.layout, made, 0, (loss,))
    values = torch.randn(COUNT, 5, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    batches = [MicroBatch(lambda x=value: {"x": x}, (0, place)) for place, value in enumerate(values)]
    sources = {(stage.head, "d.loss"): torch.ones(())}
    kept = executor.run(program, batches, sources, training=True)
    executor.streams.close()
    assert all(parameter.isnan().all() for flat in stage.flat_parameters for parameter in flat.placements)
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return [kept[place][loss] for place in range(COUNT)], gradients, recorder


@pytest.mark.parametrize(
    ("sharded", "plan"), [("parameters", "sequential"), ("parameters", "greedy"), ("optimizer", "greedy")]
)
def test_losses_and_gradients_are_those_of_whole_weights(sharded: str, plan: str) -> None:
    losses, gradients, _ = window("")
    mine, result, recorder = window(sharded, plan)
    assert all(loss.isfinite() for loss in losses)
    for one, other in zip(mine, losses, strict=True):
        assert torch.equal(one, other)
    for name, gradient in gradients.items():
        assert result[name].dtype is torch.float32, name
        assert torch.equal(result[name], gradient), name
    layer = sum(size * (WIDTH + 1) for size in SIZES) + WIDTH * (SIZES[0] + 1)
    assert gradients["0.norm"].abs().sum() > 0
    if sharded == "parameters":  # forward, and for layers again in backward; the biases begin at a multiple of 32
        sent = [(move.value[1], move.value[0].numel()) for move in recorder.moved]
        halves = [count for dtype, count in sent if dtype is torch.bfloat16]
        assert len(halves) == COUNT * (2 * 2 + 1)
        assert max(halves) <= layer + 4 * 32
        assert sorted({count for dtype, count in sent if dtype is torch.float32}) == [WIDTH]
        assert len(sent) - len(halves) == COUNT * (2 * 2 + 2), "the norms, and the table, which backward reads here"
