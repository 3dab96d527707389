"""FSDP (ZeRO-3) of the stock Trainer: seconds and memory of a step.

In:   the amounts of a rank of plain data parallelism, its case, and a cluster.
Out:  an `FSDP`.
Must hold: amounts, rates and links are the same as for the layouts of hf_helix; nothing here is built by hf_helix.

Weights, gradients and states are sharded over all ranks. A layer's weights are gathered before its forward and again
before its backward, and its gradients are reduce-scattered after its backward: three times the bytes of the weights in
all (ZeRO, arXiv 1910.02054, sections 5.3 and 7.2.2). While a layer computes, the next layer's weights are gathered, and
no further layer's (FSDP, arXiv 2304.11277, sections 3.3.1 to 3.3.3, and 3.4 on the rate limiter). A gather is exposed
by the time in which it outlasts the computation. The embedding, the final norm and the head are gathered before forward
and kept until the end of backward.

With several micro-batches in a window, the stock Trainer reduces gradients in the last micro-batch only; before, full
gradients accumulate (section 3.3.4). If full gradients do not fit,
`GradientAccumulationPlugin(sync_each_batch=True)` of Accelerate reduces gradients in every micro-batch; both settings
are tried. Gathered weights and full gradients have the type of matrix products, like Accelerate's mixed precision of
FSDP.

Activations are the same as in hf_helix, except for the loss: `ForCausalLMLoss` of Transformers casts all logits to fp32
at once (`logits.float()`), and the backward of its cross-entropy holds the log-softmax, the gradient of the log-softmax
and the gradient of the logits, all three in fp32 (`FP32_LOGITS`).

Left out, in favour of FSDP: the host's time to issue operators, and copies into and out of the buffers of collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hf_helix.doctor.amounts.amounts import Amounts
from hf_helix.doctor.amounts.kernels import MATMUL, Transfer
from hf_helix.doctor.estimate import Ring, estimate_profile, rings, transfer_seconds
from hf_helix.doctor.memory import ELEMENT, GRADIENT, PARAMETER, STATES, Memory
from hf_helix.doctor.step import (
    OPTIMIZER_BYTES,
    Case,
    Step,
    layout_of,
    memory_of_case,
    model_flops,
)
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Pair

FP32_LOGITS = 3
"""Number of fp32 tensors of the logits' size, live at the same time in the loss of Transformers. On an H100,
cross-entropy of bf16 logits needed these tensors and the logits: 13.7 GiB for 8,192 x 128,256
(benchmarks/results/2026-11-22-gpu-h100.md)."""


@dataclass(frozen=True)
class FSDP:
    """A step under FSDP.

    Attributes:
        step: its seconds and its memory.
        sync_each_batch: whether gradients are reduced in every micro-batch.
    """

    step: Step
    sync_each_batch: bool


@dataclass(frozen=True)
class _Unit:
    """A layer, wrapped by FSDP as one unit.

    Attributes:
        forward: seconds of its forward.
        backward: seconds of its backward.
        gather: seconds of the gather of its weights.
        reduce: seconds of the reduction of its gradients.
        weights: bytes of the gathered weights.
        gradients: bytes of the full gradients.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    weights: int
    gradients: int


def simulate_fsdp(amounts: Amounts, case: Case, cluster: Cluster, sync_each_batch: bool = False) -> FSDP:
    """Returns an optimizer step under FSDP over all devices.

    Args:
        sync_each_batch: whether to reduce gradients in every micro-batch.

    Raises:
        ValueError: the device has no peak for the type of matrix products.
    """
    layout = layout_of(amounts, case)
    ring = rings(cluster, case.sizes)["dp"]
    profile = estimate_profile(amounts, layout, case.sizes, cluster, case.dtype)
    units = {}
    for name, pair in layout.graphs.items():
        seconds = {"F": 0.0, "B": 0.0}
        for entry, _ in pair.entries():
            seconds[entry[0]] += profile.times[name, entry]
        units[name] = _unit(amounts, name, (seconds["F"], seconds["B"]), ring, case, cluster)
    first, *layers, last = [units[name] for name in amounts.model.units]
    kept, reduced = (_MicroBatch(first, layers, last, ring, cluster, sums) for sums in (False, True))
    others = reduced if sync_each_batch else kept
    kind, more = _kind(ring), case.microbatches - 1
    step = Step(
        case,
        window=more * (others.seconds + others.tail) + reduced.seconds,
        sums=reduced.tail,
        optimizer=_optimizer(amounts, case, cluster),
        loads={Kind.COMPUTE: case.microbatches * reduced.computing, kind: more * others.sent + reduced.sent},
        exposed={kind: more * (others.exposed + others.tail) + reduced.exposed},
        bubble=0.0,
        memory=_memory(amounts, case, [first, last], layers, sync_each_batch),
        model_flops=model_flops(amounts, case),
    )
    return FSDP(step, sync_each_batch)


class _MicroBatch:
    """Forward and backward of a micro-batch.

    Args:
        first: the embedding.
        layers: the layers in forward order.
        last: norm, head and loss.
        ring: all devices.
        cluster: the rates of links and contention.
        reduces: whether gradients are reduced.

    Attributes:
        seconds: seconds of forward and backward.
        tail: seconds of gradient reduction after backward.
        computing: seconds of computation without overlap.
        sent: seconds of communication without overlap.
        exposed: seconds of communication without concurrent computation, except `tail`.
    """

    def __init__(
        self, first: _Unit, layers: Sequence[_Unit], last: _Unit, ring: Ring, cluster: Cluster, reduces: bool
    ) -> None:
        kind, gathered = _kind(ring), ring.sent(layers[0].weights)
        self._slow = cluster.slowdowns(Kind.COMPUTE, kind, (0, gathered))
        self.seconds = self.exposed = self.computing = self.sent = 0.0
        ends = first.gather + last.gather
        self._run(0.0, ends)
        self._run(first.forward, layers[0].gather)
        for layer, following in pairwise(layers):
            self._run(layer.forward, following.gather)
        self._run(layers[-1].forward, 0.0)
        self._run(last.forward + last.backward, layers[-1].gather)
        waiting = 0.0  # reduction of the gradients of the previous layer in backward
        for layer, following in pairwise(layers[::-1]):
            self._run(layer.backward, following.gather + waiting)
            waiting = layer.reduce if reduces else 0.0
        self._run(layers[0].backward, waiting)
        rest = layers[0].reduce if reduces else 0.0
        self._run(first.backward, rest)
        self.tail = first.reduce + last.reduce if reduces else 0.0
        self.sent += self.tail

    def _run(self, computing: float, sending: float) -> None:
        """Adds computation overlapped with communication; they start together, and the next step waits for both."""
        together, alone = computing + sending, sending
        if computing and sending:
            pair = Pair.of(computing, sending, *self._slow)
            together, alone = pair.together, pair.together - pair.first
        self.seconds += together
        self.exposed += alone
        self.computing += computing
        self.sent += sending


def _unit(amounts: Amounts, name: str, seconds: tuple[float, float], ring: Ring, case: Case, cluster: Cluster) -> _Unit:
    held, size = amounts.weights[name], ELEMENT[case.dtype]
    gradients = size * held.all_trained
    weights = gradients + size * held.all_frozen

    def moved(method: str, count: int) -> float:
        return transfer_seconds(Transfer("dp", method, ring.sent(count)), ring, cluster)

    return _Unit(*seconds, moved("all_gather", weights), moved("reduce_scatter", gradients), weights, gradients)


def _kind(ring: Ring) -> Kind:
    return Kind.INTER_NODE if ring.crosses else Kind.INTRA_NODE


def _model_size(amounts: Amounts) -> tuple[int, int]:
    """Returns the number of trained elements of the model, and the bytes of frozen weights."""
    held = [amounts.weights[name] for name in amounts.model.units]
    return sum(each.all_trained for each in held), sum(each.frozen_itemsize * each.all_frozen for each in held)


def _optimizer(amounts: Amounts, case: Case, cluster: Cluster) -> float:
    trained, _ = _model_size(amounts)
    mine = trained / case.sizes.dp
    return cluster.device.moving_seconds(OPTIMIZER_BYTES * mine, PARAMETER * mine)


def _memory(
    amounts: Amounts, case: Case, ends: Sequence[_Unit], layers: Sequence[_Unit], sync_each_batch: bool
) -> Memory:
    """Returns the memory of a device: its shards of weights, gradients and states, gathered weights of two layers and
    of the ends, gradients of two layers in reduction, and the activations of one micro-batch."""
    trained, frozen = _model_size(amounts)
    shares = case.sizes.dp
    whole = 0 if sync_each_batch or case.microbatches == 1 else ELEMENT[case.dtype] * trained
    largest = sorted(layers, key=lambda unit: unit.weights)[-2:]
    return Memory(
        weights=(PARAMETER * trained + frozen) / shares,
        gradients=GRADIENT * trained / shares + whole,
        states=STATES * trained / shares,
        copies=sum(unit.weights for unit in (*ends, *largest)),
        activations=_activations(amounts, case),
        buffers=sum(unit.gradients for unit in largest),
    )


def _activations(amounts: Amounts, case: Case) -> float:
    """Returns the peak activation bytes of a micro-batch under the loss of Transformers."""
    units = amounts.model.units
    kept: Counter[str] = Counter()
    logits = 0
    for (unit, entry), counted in amounts.operators.items():
        if entry.startswith("F."):
            kept[unit] += counted.delta
            products = [kernel.sizes for kernel in counted.kernels if kernel.sort == MATMUL and unit == units[-1]]
            logits += sum(count * rows * columns for count, rows, columns, _ in products)
    in_loss = sum(kept[unit] for unit in units[:-1]) + FP32_LOGITS * ELEMENT["fp32"] * logits
    return max(in_loss, memory_of_case(amounts, replace(case, microbatches=1)).activations)
