"""How many kernels one decoder layer launches, forward and backward, operator by operator.

Measured: the calls of one layer that reach torch's dispatcher and compute or copy something, in the second window of
training, when gradients are there to be added to. Views and allocations do not count. No device is needed: a kernel of
CUDA is counted where CUDA has one for what the CPU computes in several steps (see `FUSED`), and kernels of Triton leave
their results as they find them. What is left out: the
collectives themselves, and that a few calls launch more than one kernel (a matrix product split along its inner
dimension, a sum over rows of a tall matrix). With `--compile`, a function that is compiled counts as many kernels as
it has nests of loops in the C++ that is compiled for the CPU: at least as many as on CUDA, where more is fused.

    python -m benchmarks.kernel_count
    python -m benchmarks.kernel_count --compile
    python -m benchmarks.kernel_count --model qwen3 --tp_size 1 --precision fp32
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import options_of
from hf_helix.models import stock_modules
from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.graph import builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.operators import matmul_dtype
from hf_helix.operators.base import Call, Communication, Method, TensorOperator, Tensors, TransferFn
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.fused import kernels as fused
from hf_helix.operators.linears import accumulate
from hf_helix.operators.unit import Unit
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.stage import place_units
from hf_helix.runtime.streams import make_streams

FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
FREE |= {"promote_types"}
"""Calls that launch nothing, besides those that return views of what they are given."""

FUSED: dict[Callable[..., Any], tuple[str, int, int]] = {functional.rms_norm: ("rms_norm", 1, 2)}
"""Functions that the CPU computes in several steps: their names, and what CUDA launches forward and backward."""

NEST = re.compile(r"^ {4}\{$", re.MULTILINE)
"""Where a nest of loops begins in the C++ that inductor writes: what it fuses, as it would into a kernel of CUDA."""

SUMS = "sums of gradients"
"""What the executor itself adds, where several operators read one value."""

WINDOW = "window.weights"
"""Copies of weights in the type of products, which are made once for all micro-batches of a window."""

PRECISIONS = {"bf16": torch.bfloat16, "fp32": None}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64}


class Kernels(TorchDispatchMode):
    """Counts kernels while it is entered.

    Attributes:
        counted: how many of each call, by what was running: `counted["F.attn.norm"]["aten.mul"]`.
        running: what they are counted for; nothing is counted while it is None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[str, Counter[str]] = {}
        self.running: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_free(function):
            self.note(str(function).rsplit(".", 1)[0])
        return GEMMS.get(function, function)(*args, **(kwargs or {}))

    def note(self, name: str, count: int = 1) -> None:
        """Count kernels for what is running."""
        if self.running is not None:
            self.counted.setdefault(self.running, Counter())[name] += count

    @contextmanager
    def run(self, label: str | None) -> Iterator[None]:
        """Count for `label` meanwhile."""
        before, self.running = self.running, label
        try:
            yield
        finally:
            self.running = before

    def totals(self) -> dict[str, int]:
        """Kernels by what was running, in order."""
        return {label: sum(calls.values()) for label, calls in self.counted.items()}

    def total(self, prefix: str = "") -> int:
        """Of everything whose label starts so: `F.`, `B.`, or all."""
        return sum(count for label, count in self.totals().items() if label.startswith(prefix))


class _AsOnCuda(TorchFunctionMode):
    """Counts the functions of `FUSED` as CUDA computes them."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in FUSED:
            return function(*args, **(kwargs or {}))
        return _Fused.apply(self.kernels, function, list(kwargs or {}), *args, *(kwargs or {}).values())


class _Fused(torch.autograd.Function):
    """A function of `FUSED`, with the steps of the CPU left out of the count."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, function: Callable[..., Tensor], names: list[str], *args: Any) -> Tensor:
        ctx.kernels, (ctx.name, count, ctx.count) = kernels, FUSED[function]
        ctx.leaves = [value.detach().requires_grad_() if isinstance(value, Tensor) else value for value in args]
        kernels.note(ctx.name, count)
        with kernels.run(None), torch.enable_grad():
            first = len(args) - len(names)
            ctx.made = function(*ctx.leaves[:first], **dict(zip(names, ctx.leaves[first:], strict=True)))
        return ctx.made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.kernels.note(ctx.name, ctx.count)
        with ctx.kernels.run(None):
            gradients = iter(torch.autograd.grad(ctx.made, [v for v in ctx.leaves if isinstance(v, Tensor)], gradient))
        return None, None, None, *(next(gradients) if isinstance(value, Tensor) else None for value in ctx.leaves)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(total + _product(left, right, dtype))


GEMMS = {
    torch.ops.aten.mm.dtype: _product,
    torch.ops.aten.addmm.dtype_out: _add_product,
    torch.ops.aten.baddbmm.dtype_out: _add_product,
}
"""Matrix products that CUDA has a kernel for and the CPU has none."""


def _adds_in_gemm(factor: Tensor, dtype: torch.dtype) -> bool:
    """What `hf_helix.operators.linears.accumulate.in_one_gemm` says on CUDA."""
    return factor.dtype is torch.bfloat16 and dtype is torch.float32


@contextmanager
def _replaced(module: Any, name: str, other: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _compiled_as_counted(kernels: Kernels) -> Iterator[None]:
    """What is compiled meanwhile counts as many kernels as it has nests of loops for the CPU."""

    def compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
        function: Any = compile_fx_inner(graph, inputs, **options)
        count = len(NEST.findall(function.source_code))

        def run(values: list[Any]) -> Any:
            kernels.note("compiled", count)
            with kernels.run(None):
                return function(values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        backend = functools.partial(compile_fx, inner_compile=compile_graph)
        run = torch.compile(function, backend=backend)

        def call(*given: Any, **named: Any) -> Any:
            with _disable_current_modes(), torch._C.DisableTorchFunction():  # under which nothing is compiled
                return run(*given, **named)

        return call

    with _replaced(builder, "compiled", compiled):
        yield


@contextmanager
def _weights_apart(kernels: Kernels) -> Iterator[None]:
    """Copies of weights count for the window, not for the micro-batch that comes first."""
    copy = matmul_dtype.joined_cast

    def counted(*given: Any) -> Tensor:
        with kernels.run(WINDOW if kernels.running else None):
            return copy(*given)

    with _replaced(matmul_dtype, "joined_cast", counted):
        yield


def count_layer(
    model: Any, tp_size: int = 2, autocast_dtype: torch.dtype | None = torch.bfloat16, compiles: bool = False
) -> Kernels:
    """The kernels of the first decoder layer of a model, in its second window.

    Args:
        model: a Transformers causal language model that a family describes; it is trained a little.
        tp_size: the number of tensor-parallel ranks, of which one is run.
        autocast_dtype: the type of matrix products, see `Precision`.
        compiles: as under `HelixConfig(compile=True)`.
    """
    kernels = Kernels()
    with _compiled_as_counted(kernels):
        runner, window = _runner(model, tp_size, autocast_dtype, kernels, compiles)
        runner.train_window(window)
    kernels.counted.clear()
    with (
        kernels,
        _AsOnCuda(kernels),
        _replaced(stock_modules, "DEVICES", {"cpu"}),
        _replaced(fused, "is_on", lambda value: True),
        _replaced(fused, "launch", lambda *given, **options: None),
        _replaced(accumulate, "in_one_gemm", _adds_in_gemm),
        _weights_apart(kernels),
    ):
        runner.train_window(window)
    return kernels


def _runner(
    model: Any, tp_size: int, autocast_dtype: torch.dtype | None, kernels: Kernels, compiles: bool
) -> tuple[Runner, list[MicroBatch]]:
    family, axis = family_of(model), Axis(SilentTransport(tp_size, 0))
    ids = torch.arange(16).view(1, -1)
    batch = {"input_ids": ids, "labels": ids}
    side = family.side_inputs(model.train(), batch, SequenceCut(tp_size), torch.tensor(1.0))
    context = ParallelContext(axis, compile=compiles)
    units = [_watched(unit, kernels) for unit in family.units(model, context)]
    stage = place_units(units)
    sizes = {"dp": 1, "pp": 1, "cp": 1, "tp": tp_size, "ep": 1}
    mesh = Mesh(sizes, torch.device("cpu"), None, axis, Axis.single(), axis, Pipe([0]), None, None, None, None)
    plan = make_plan("sequential", rough_profile(stage.layout), model=family.model_class, mesh={"tp_size": tp_size})
    runner = Runner(stage, plan, mesh, make_streams(mesh.device), Scheduler("folded_1f1b", 1), 0, autocast_dtype)
    return runner, [MicroBatch(lambda: side, (0, 0))]


def _watched(unit: Unit, kernels: Kernels) -> Unit:
    """The unit, whose operators say when they run; those of other units than the first layer switch counting off."""
    counts = unit.label == "layers.0"
    operators: dict[str, TensorOperator] = {}
    for name, operator in unit.operators.items():
        counter = _Counter(name, kernels, counts)
        if isinstance(operator, Communication):
            operators[name] = _WatchedCommunication(operator, counter)
        else:
            operators[name] = _Watched(operator, counter)
    return replace(unit, operators=operators)


class _Counter:
    """Counts for an operator while it runs, and for the executor after it."""

    def __init__(self, name: str, kernels: Kernels, counts: bool) -> None:
        self._name, self._kernels, self._counts = name, kernels, counts

    def run(self, part: Part, function: Callable[..., Any], *given: Any) -> Any:
        label = f"F.{self._name}" if part is Part.F else f"B.{self._name}"
        if part in (Part.I, Part.W, Part.R):
            label += f".{part.value}"
        with self._kernels.run(label if self._counts else None):
            outputs = function(*given)
        self._kernels.running = f"B.{SUMS}" if self._counts and part is not Part.F else None
        return outputs


class _Watched(TensorOperator):
    """A computation that counts."""

    def __init__(self, operator: TensorOperator, counter: _Counter) -> None:
        self._operator, self._counter = operator, counter

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self._operator.parameters

    def method_of(self, part: Part) -> Method:
        method = self._operator.method_of(part)
        return lambda call, *inputs: self._counter.run(part, method, call, *inputs)


class _WatchedCommunication(Communication):
    """A communication that counts."""

    def __init__(self, operator: Communication, counter: _Counter) -> None:
        self._operator, self._counter = operator, counter

    def prepare(self, call: Call, part: Part, *inputs: Tensor) -> tuple[Tensors, TransferFn]:
        return self._counter.run(part, self._operator.prepare, call, part, *inputs)


def _is_free(function: Any) -> bool:
    schema = function._schema
    if function.namespace not in ("aten", "hf_helix_fused") or schema.name.split("::")[1] in FREE:
        return True
    return bool(function.is_view)


def main() -> None:
    parser = options_of(__doc__, model="llama", tp_size=2)
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    parser.add_argument("--compile", action="store_true", help="as under HelixConfig(compile=True)")
    parser.add_argument("--calls", action="store_true", help="also which calls they are")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.model, **SIZES))
    kernels = count_layer(model, options.tp_size, PRECISIONS[options.precision], options.compile)
    print(f"kernels of a layer of {type(model).__name__}, tp_size={options.tp_size}, {options.precision}\n")
    for label, count in kernels.totals().items():
        calls = ", ".join(f"{name} {number}" for name, number in kernels.counted[label].items())
        print(f"  {label:<28} {count:>3}{f'   {calls}' if options.calls else ''}")
    forward, backward = kernels.total("F."), kernels.total("B.")
    print(f"\nforward {forward}, backward {backward}, together {forward + backward}", end="")
    print(f"; once for all micro-batches of a window {kernels.total(WINDOW)}")


if __name__ == "__main__":
    main()
