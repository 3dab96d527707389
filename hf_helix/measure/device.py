"""Rates of a device, by size.

In:   a stopwatch.
Out:  operations a second of products and of attention, bytes a second of element-wise kernels, exponentials a second,
      and the seconds of an empty kernel and of an empty operator.
Must hold: the timed works are the kernels of a decoder: products of all three parts of a linear, attention with its
backward, element-wise kernels. Their operands are not in the nearest cache, and their results are new memory, kept
alive for a while.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hf_helix.measure.timing import Stopwatch, Work
from hf_helix.operators.autograd_operator import AutogradOperator
from hf_helix.operators.base import Precision
from hf_helix.operators.linears.accumulate import add_product, in_one_gemm
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.window.instructions import unit_instructions
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.executor import Executor
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.streams.streams import make_streams

Points = list[tuple[float, float]]  # (size, rate), sizes growing
SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # sides of products
SHAPES = ((1.0, 1.0, 1.0), (2.0, 1.0, 0.5), (0.5, 2.0, 1.0))  # rows, columns and depth of products, in parts of a side
KEYS = (128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, HEAD_SIZE = 8, 64

CPU_BLOCK, GPU_BLOCK = 512, 128  # keys in a block of the fused attention of torch
ELEMENTS = tuple(2**power for power in range(12, 28))  # elements of the operands of element-wise kernels
OPERANDS = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of the operands that kernels take in turn, since the operands of a step are not in the nearest cache."""

MOST_OPERANDS = 256  # the largest number of operands
ALIVE = {"cpu": 64 << 20, "cuda": 2 << 30}  # bytes of results that stay alive for a while, as activations do
LONGEST = 0.15  # seconds of a work after which no larger work is tried
CHAIN, TINY_KERNELS = 16, 8
USUAL_KERNELS = 3  # of an operator: a layer of a Llama has 63 in 25 operators without fused kernels, and 35 with


class Activations:
    """The latest results of some work, `ALIVE` bytes of them."""

    def __init__(self, device: torch.device) -> None:
        self._max_bytes, self._bytes = ALIVE[device.type], 0
        self._alive: deque[Tensor] = deque()

    def keep(self, *results: Tensor) -> None:
        """Adds results, and frees the oldest."""
        self._alive += results
        self._bytes += sum(result.nbytes for result in results)
        while self._bytes > self._max_bytes:
            self._bytes -= self._alive.popleft().nbytes


def _in_turn(device: torch.device, make: Callable[[], tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yields operands for ever, `OPERANDS` bytes in turn."""
    first = make()
    count = OPERANDS[device.type] // sum(value.nbytes for value in first)
    return itertools.cycle([first, *(make() for _ in range(min(MOST_OPERANDS, count) - 1))])


def measure_products(watch: Stopwatch, dtype: torch.dtype) -> Points:
    """Returns operations a second, by the operations of a product."""
    points = []
    for side in SIDES:
        shapes = [tuple(max(8, int(side * factor)) for factor in factors) for factors in SHAPES]
        works = [(2.0 * m * n * k, work) for m, n, k in shapes for work in _linear(watch.device, dtype, m, n, k)]
        seconds = sum(watch.seconds(work) for _, work in works)
        points.append((2.0 * side**3, sum(operations for operations, _ in works) / seconds))
        if seconds > len(works) * LONGEST / 8:
            break
    return points


def _linear(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> list[Work]:
    """F, I and W of a linear: `m` tokens, `n` features out, `k` features in."""

    def operands() -> tuple[Tensor, ...]:
        value, gradient, weight = (torch.randn(size, device=device, dtype=dtype) for size in ((m, k), (m, n), (n, k)))
        total_type = torch.float32 if in_one_gemm(value, torch.float32) else dtype
        return value, gradient, weight, torch.zeros(n, k, device=device, dtype=total_type)

    turns, results = _in_turn(device, operands), Activations(device)

    def forward() -> None:
        value, _, weight, _ = next(turns)
        results.keep(functional.linear(value, weight))

    def input_gradient() -> None:
        _, gradient, weight, _ = next(turns)
        results.keep(gradient @ weight)

    def weight_gradient() -> None:
        value, gradient, _, total = next(turns)
        add_product(total, gradient.t(), value)

    return [forward, input_gradient, weight_gradient]


def measure_attention(watch: Stopwatch, dtype: torch.dtype) -> Points:
    """Returns seconds of causal attention, forward and backward, by keys; see `attention_work`."""
    points = []
    for keys in KEYS:
        with torch.enable_grad():
            seconds = watch.seconds(_attention(watch.device, dtype, keys))
        points.append((float(keys), seconds))
        if seconds > LONGEST:
            break
    return points


def _attention(device: torch.device, dtype: torch.dtype, keys: int) -> Work:
    """Causal attention, forward and backward."""

    def operands() -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, HEADS, keys, HEAD_SIZE, device=device, dtype=dtype) for _ in range(4))

    turns, results = _in_turn(device, operands), Activations(device)

    def work() -> None:
        *leaves, gradient = next(turns)
        q, k, v = (value.requires_grad_() for value in leaves)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        results.keep(out.detach(), *torch.autograd.grad(out, (q, k, v), gradient))

    return work


def attention_work(keys: float, block: int) -> tuple[float, float]:
    """Returns the operations and the exponentials of causal attention, forward and backward; a mask spares full blocks
    only."""
    blocks = -(-keys // block)
    pairs = HEADS * keys * keys * (1 + 1 / blocks) / 2
    return 14.0 * pairs * HEAD_SIZE, 2.0 * pairs


def measure_memory(watch: Stopwatch) -> Points:
    """Returns bytes a second, by the bytes that an element-wise kernel reads and writes."""
    empty = watch.seconds(_elementwise(watch.device, 8)) / 3
    points = []
    for elements in ELEMENTS:
        seconds = watch.seconds(_elementwise(watch.device, elements)) / 3
        moved = 4.0 * elements * 8 / 3
        if seconds > 1.3 * empty:
            points.append((moved, moved / (seconds - empty)))
        if seconds > LONGEST / 4:
            break
    return points


def _elementwise(device: torch.device, elements: int) -> Work:
    """A sum, a product and a negative: eight passes over memory, each kernel with a result of its own."""
    turns = _in_turn(device, lambda: (torch.randn(elements, device=device), torch.randn(elements, device=device)))
    results = Activations(device)

    def work() -> None:
        first, other = next(turns)
        total = first + other
        product = total * other
        results.keep(total, product, -product)

    return work


def decoder_work(device: torch.device, factor: float = 1.0) -> Work:
    """Returns a work of a few milliseconds like a decoder layer: products of sides by a factor, and small kernels."""
    side = int(factor * (1024 if device.type == "cuda" else 256))
    products = _linear(device, torch.bfloat16 if device.type == "cuda" else torch.float32, 4 * side, side, side)
    small = _elementwise(device, side * side)

    def work() -> None:
        for product in products:
            product()
        small()

    return work


def measure_exponentials(watch: Stopwatch) -> float:
    """Returns exponentials a second, a mean over activations and softmax."""
    value = torch.randn(256, 256, device=watch.device)
    works: list[Work] = [value.exp, value.sigmoid, lambda: functional.silu(value), lambda: value.softmax(-1)]
    return value.numel() * len(works) / sum(map(watch.seconds, works))


def measure_calls(watch: Stopwatch) -> tuple[float, float]:
    """Returns the seconds of a kernel in a row of kernels, and of an operator issued by the executor."""
    if watch.device.type == "cuda":  # the host issues kernels, and the device takes their times
        operator = watch.host_seconds(_chain(watch.device, USUAL_KERNELS)) / (2 * CHAIN)
        return watch.seconds(_elementwise(watch.device, 8)) / 3, operator
    operator = watch.seconds(_chain(watch.device, 0)) / (2 * CHAIN)
    with_kernels = watch.seconds(_chain(watch.device, TINY_KERNELS)) / (2 * CHAIN)
    return (with_kernels - operator) / TINY_KERNELS, operator


def _chain(device: torch.device, kernels: int) -> Work:
    """`CHAIN` operators in a row, forward and backward, each of some kernels of a few elements."""

    def function(value: Tensor) -> Tensor:
        for _ in range(kernels):
            value = value * 1.5
        return value.view_as(value)

    names = [f"x{place}" for place in range(CHAIN + 1)]
    operators = [
        Operator(name=f"op{place}", kind=Kind.COMPUTE, reads=(first,), writes=(second,))
        for place, (first, second) in enumerate(itertools.pairwise(names))
    ]
    pair = GraphPair.of(Graph("chain", tuple(operators), (names[0],), (names[-1],)))
    unit = Unit(
        label="chain", graphs=pair, operators={op.name: AutogradOperator(function) for op in operators}, placements={}
    )
    layout = Layout(["chain"], {0: [0]}, {"chain": pair})
    program = [each for forward in (True, False) for each in unit_instructions(layout, (0, 0, forward))]
    executor = Executor({0: unit}, make_streams(device), 0, Precision(device.type, None), layout)
    value = torch.randn(8, device=device)
    sources = {layout.key(0, pair.forward.inputs[0], True): value, layout.key(0, pair.backward.inputs[0], False): value}
    batches = [MicroBatch(dict, (0, 0))]
    return lambda: executor.run(program, batches, lambda _: sources, saves_for_backward=True)
