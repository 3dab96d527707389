"""One window of micro-batches: through hf_helix's engine, and through the unsplit model of Transformers.

In:   a function that makes the model, the batches, a mesh, options.
Out:  losses and gradients by name, in fp64 on the CPU.
Must hold: one process can play rank 0 of any layout. Where nothing is carried between ranks, what it computes depends
on its inputs alone: it is the same on every device, under every plan and at every pace of the links.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.models import Batch, on, targets
from hf_helix import HelixConfig
from hf_helix.engine.cut.build import RunOptions
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.engine.engine import Engine
from hf_helix.models.direct_use import Instead
from hf_helix.operators.communication.transport import Axis, SilentTransport, Transport
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.mesh import Mesh, Pipe
from hf_helix.runtime.divided import plain_parameters

INSTEAD = Instead("the engine", "engine.save_pretrained(folder)")


@dataclass(frozen=True)
class Window:
    """What a window leaves: the losses of its micro-batches, and the gradients by name."""

    losses: list[float]
    gradients: dict[str, Tensor]


class Local(SilentTransport):
    """Carries nothing, and adds up as NCCL's groups do: values of two bytes by an exchange and a sum."""

    def prefers_exchange(self, value: Tensor) -> bool:
        return value.element_size() < 4


def silent_mesh(
    device: torch.device, tp: int = 1, cp: int = 1, ep: int = 1, made: Callable[[int, int], Transport] = Local
) -> Mesh:
    """The mesh of rank 0 of a layout that has no other ranks.

    Args:
        tp, cp, ep: the sizes of the axes.
        made: makes a transport of a size and a rank.
    """

    def axis(size: int, kind: Kind) -> Axis:
        return Axis.single() if size == 1 else Axis(made(size, 0), kind)

    tensor, context = axis(tp, Kind.INTRA_NODE), axis(cp, Kind.INTER_NODE)
    experts = tensor if ep == 1 else axis(ep * tp, Kind.INTER_NODE)
    sizes = {"dp": ep, "pp": 1, "cp": cp, "tp": tp, "ep": ep}
    return Mesh(sizes, device, None, tensor, context, experts, Pipe([0], ()), None, None, None, None)


@contextmanager
def engine_on(
    made: Callable[[], Any], mesh: Mesh, count: int, autocast_dtype: torch.dtype | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine of a fresh model on a mesh, closed in the end.

    Args:
        made: makes the model.
        count: micro-batches of a window.
        products: the type of matrix products under autocast.
        options: of `HelixConfig`; the plan is `sequential` unless one is given, and graphs are asked for.
    """
    # The sizes of a mesh without other ranks are not those of the world, which the configuration is checked against.
    config = HelixConfig(**{"plan": "sequential", "cache": False, "cuda_graphs": False, **options})
    model = made()
    run = RunOptions(num_microbatches=count, autocast_dtype=autocast_dtype)
    # A derived family cannot be proven on ranks that carry nothing; the piece `ranks` proves it on real ones.
    with patch("hf_helix.engine.engine.prove_on_first_use"):
        engine = Engine(model, config, mesh, run, INSTEAD)
    model.to(mesh.device)
    model.train()
    try:
        yield engine
    finally:
        engine.close()


def train(engine: Engine, window: Sequence[Batch], step: int = 0) -> Window:
    """Run a window on an engine's plan; its gradients are taken away again. The loss is the mean over its tokens."""
    device = engine.mesh.device
    scale = LossScale(torch.tensor(engine.mesh.dp_size / targets(window), device=device), 1 / len(window))
    losses = [loss.detach() for loss in engine.session.train_window(on(window, device), scale, step)]
    with plain_parameters():  # what this rank holds: there are no others to gather the rest from
        named = [(name, parameter.grad) for name, parameter in engine.model.named_parameters()]
        gradients = {name: gradient.double().cpu() for name, gradient in named if gradient is not None}
    engine.model.zero_grad()
    return Window([loss.item() for loss in losses], gradients)


@contextmanager
def deterministic() -> Iterator[None]:
    """While it is entered, kernels give the same bits each time, attention is written out as products, and torch fills
    new memory with nan, so that what is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def under_plan(engine: Engine, rule: str) -> None:
    """Let the engine go on under the plan of a rule, made from rough times."""
    runner = engine.runner
    plan = make_plan(rule, rough_profile(runner.rank_units.layout), model=runner.plan.model, mesh=runner.plan.mesh)
    engine.session.runner = runner.with_plan(plan)


def unsplit(
    made: Callable[[], Any],
    window: Sequence[Batch],
    device: torch.device,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> Window:
    """The same window through the model as Transformers has it.

    Args:
        autocast: the type of matrix products, as under the stock Trainer with `bf16=True`.
        dtype: of the weights; fp64 makes a reference.
    """
    model = made().train()
    model.set_experts_implementation("eager")  # the grouped GEMMs of torch take neither fp64 nor, everywhere, fp32
    if dtype is torch.float64:
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    model.to(device)
    count, losses = targets(window), []
    for batch in on(window, device):
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            loss = model(**batch, num_items_in_batch=count, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return Window(losses, gradients)


def loss_error(window: Window, wanted: Window) -> float:
    """The largest relative error of a loss."""
    pairs = zip(window.losses, wanted.losses, strict=True)
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def gradient_errors(window: Window, wanted: Window, least: float = 1e-12) -> dict[str, float]:
    """By name, how far a gradient is off, in parts of its norm; infinite where one is missing or not finite.

    Args:
        window, wanted: of the same model.
        least: what a smaller norm counts as.
    """
    errors = {}
    for name in {*window.gradients, *wanted.gradients}:
        mine, theirs = window.gradients.get(name), wanted.gradients.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape or not bool(mine.isfinite().all()):
            errors[name] = float("inf")
        else:
            errors[name] = float((mine - theirs).norm() / theirs.norm().clamp(min=least))
    return errors


def worst(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest, and its name."""
    return max((error, name) for name, error in errors.items())


def same_bits(window: Window, wanted: Window) -> str:
    """The first thing that differs in any bit; empty where nothing does."""
    if window.losses != wanted.losses:
        return f"losses {window.losses} and {wanted.losses}"
    if window.gradients.keys() != wanted.gradients.keys():
        return "which parameters have gradients"
    for name, gradient in window.gradients.items():
        if not torch.equal(gradient, wanted.gradients[name]):
            return f"the gradient of {name}, by {float((gradient - wanted.gradients[name]).abs().max()):.1e}"
    return ""
