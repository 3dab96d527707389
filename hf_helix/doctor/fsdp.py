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

The host issues the same operators as in hf_helix, in `STOCK_ISSUES` times as long; where it takes longer than the
device, its time counts. Left out, in favour of FSDP: the hooks of FSDP on the host, and copies into and out of the
buffers of collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from hf_helix.doctor.amounts.amounts import Amounts, Weights
from hf_helix.doctor.amounts.meter import MATMUL, Transfer
from hf_helix.doctor.estimate import Ring, estimate_profile, rings, transfer_seconds
from hf_helix.doctor.memory import ELEMENT, GRADIENT, PARAMETER, Memory
from hf_helix.doctor.step import OPTIMIZER_BYTES, Case, Step, layout_of, memory_of_case, model_flops
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.profile import Pair

FP32_LOGITS = 3
"""Number of fp32 tensors of the logits' size, live at the same time in the loss of Transformers. On an H100,
cross-entropy of bf16 logits needed these tensors and the logits: 13.7 GiB for 8,192 x 128,256
(benchmarks/results/2026-11-22-gpu-h100.md)."""

STOCK_ISSUES = 1.1
"""The host's time of the stock Trainer in parts of HelixTrainer's: 513 and 467 ms for the same 8 x 1 x 2048 tokens on
an H100 (benchmarks/results/2026-11-22-gpu-h100.md)."""


@dataclass(frozen=True)
class FSDP:
    """A step under FSDP, with gradients reduced in the last or in every micro-batch."""

    step: Step
    sync_each_batch: bool


class _Unit(NamedTuple):
    """A layer, wrapped by FSDP as one unit: seconds of passes and communication, bytes of weights and gradients."""

    forward: float
    backward: float
    gather: float
    reduce: float
    weights: int
    gradients: int


class _MicroBatch(NamedTuple):
    """Seconds of forward and backward of a micro-batch."""

    seconds: float  # forward and backward, overlapped with communication
    tail: float  # gradient reduction after backward
    computing: float  # computation without overlap
    sent: float  # communication without overlap
    exposed: float  # communication without concurrent computation, except `tail`


def simulate_fsdp(amounts: Amounts, case: Case, cluster: Cluster, sync_each_batch: bool = False) -> FSDP:
    """Returns an optimizer step under FSDP over all devices; gradients are reduced in the last micro-batch or, with
    `sync_each_batch`, in all. Raises ValueError if the device has no peak for the type of matrix products."""
    layout = layout_of(amounts, case)
    ring = rings(cluster, case.sizes)["dp"]
    profile = estimate_profile(amounts, layout, case.sizes, cluster, case.dtype)
    units = {}
    for name, pair in layout.graphs.items():
        seconds = {"F": 0.0, "B": 0.0}
        for entry, _ in pair.entries():
            seconds[entry[0]] += profile.times[name, entry]
        units[name] = _unit(amounts.weights[name], (seconds["F"], seconds["B"]), ring, case, cluster)
    in_order = [units[name] for name in amounts.model.units]
    kind = Kind.INTER_NODE if ring.crosses else Kind.INTRA_NODE
    slow = cluster.slowdowns(Kind.COMPUTE, kind, (0, ring.sent(in_order[1].weights)))
    last = _micro_batch(in_order, slow, reduces=True)
    others, more = _micro_batch(in_order, slow, sync_each_batch), case.microbatches - 1
    trained = sum(amounts.weights[name].all_trained for name in amounts.model.units)
    mine = trained / case.sizes.dp
    entries = sum(len(list(layout.graphs[name].entries())) for name in amounts.model.units)
    issuing = STOCK_ISSUES * case.microbatches * entries * cluster.device.issue_seconds
    window = more * (others.seconds + others.tail) + last.seconds
    step = Step(
        case,
        window=max(window, issuing) if cluster.device.host_runs_ahead else window,
        sums=last.tail,
        optimizer=cluster.device.moving_seconds(OPTIMIZER_BYTES * mine, PARAMETER * mine),
        loads={Kind.COMPUTE: case.microbatches * last.computing, kind: more * others.sent + last.sent},
        exposed={kind: more * (others.exposed + others.tail) + last.exposed},
        bubble=0.0,
        memory=_memory(amounts, case, in_order, trained, sync_each_batch),
        model_flops=model_flops(amounts, case),
    )
    return FSDP(step, sync_each_batch)


def _unit(held: Weights, seconds: tuple[float, float], ring: Ring, case: Case, cluster: Cluster) -> _Unit:
    size = ELEMENT[case.dtype]
    gradients = size * held.all_trained
    weights = gradients + size * held.all_frozen
    gather, reduce = (
        transfer_seconds(Transfer("dp", method, ring.sent(count)), ring, cluster)
        for method, count in (("all_gather", weights), ("reduce_scatter", gradients))
    )
    return _Unit(*seconds, gather, reduce, weights, gradients)


def _micro_batch(units: Sequence[_Unit], slow: tuple[float, float], reduces: bool) -> _MicroBatch:
    """Returns forward and backward of a micro-batch, with the slowdowns of computation and communication.

    In every phase computation and communication start together, and the next phase waits for both. The gradients of a
    layer are reduced during backward of the next.
    """
    first, *layers, last = units
    phases = [(0.0, first.gather + last.gather), (first.forward, layers[0].gather)]
    phases += [(layer.forward, following.gather) for layer, following in pairwise(layers)]
    phases += [(layers[-1].forward, 0.0), (last.forward + last.backward, layers[-1].gather)]
    waiting = 0.0
    for layer, gather in zip(layers[::-1], [*(layer.gather for layer in layers[-2::-1]), 0.0], strict=True):
        phases.append((layer.backward, gather + waiting))
        waiting = layer.reduce if reduces else 0.0
    phases.append((first.backward, waiting))
    tail = first.reduce + last.reduce if reduces else 0.0
    seconds = exposed = 0.0
    for computing, sending in phases:
        together, alone = computing + sending, sending
        if computing and sending:
            pair = Pair.of(computing, sending, *slow)
            together, alone = pair.together, pair.together - pair.first
        seconds, exposed = seconds + together, exposed + alone
    computed, sent = (sum(column) for column in zip(*phases, strict=True))
    return _MicroBatch(seconds, tail, computed, sent + tail, exposed)


def _memory(amounts: Amounts, case: Case, units: Sequence[_Unit], trained: int, sync_each_batch: bool) -> Memory:
    """Returns the memory of a device: its shards of weights, gradients and states, gathered weights of two layers and
    of the ends, gradients of two layers in reduction, and the activations of one micro-batch."""
    held = [amounts.weights[name] for name in amounts.model.units]
    frozen = sum(each.frozen_itemsize * each.all_frozen for each in held)
    shares = case.sizes.dp
    whole = 0 if sync_each_batch or case.microbatches == 1 else ELEMENT[case.dtype] * trained
    first, *layers, last = units
    largest = sorted(layers, key=lambda unit: unit.weights)[-2:]
    return Memory(
        weights=(PARAMETER * trained + frozen) / shares,
        gradients=GRADIENT * trained / shares + whole,
        states=case.state_bytes * trained / shares,
        copies=sum(unit.weights for unit in (first, last, *largest)),
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
