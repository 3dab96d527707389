"""Rivals: seconds and memory of a step under other ways to train on several devices.

In:   the amounts of a rank of plain data parallelism, its case, and a cluster.
Out:  a `RivalStep` of each way in `RIVALS`.
Must hold: amounts, rates and links are the same as for the layouts of hf_helix; nothing here is built by hf_helix;
omissions of a formula are in favour of the rival.

FSDP (ZeRO-3), here of Accelerate: weights, gradients and states are sharded over all ranks. A layer's weights are
gathered before its forward and again before its backward, and its gradients are reduce-scattered after its backward:
three times the bytes of the weights in all (ZeRO, arXiv 1910.02054, sections 5.3 and 7.2.2). While a layer computes,
the next layer's weights are gathered, and no further layer's (FSDP, arXiv 2304.11277, sections 3.3.1 to 3.3.3, and 3.4
on the rate limiter). A gather is exposed by the time in which it outlasts the computation. The embedding, the final
norm and the head are gathered before forward and kept until the end of backward. Gathered weights and full gradients
have the type of matrix products. Gathered weights are copied out of the buffer of a gather, and gradients into the
buffer of a reduction. The stock run has the kernels of Transformers and torch (`STOCK`); with `torch.compile` or Liger,
element-wise work is fused (`COMPILED`).
HSDP, of `DistributedConfig` in Transformers: FSDP inside each node; gradients are in fp32, and the shards of the nodes
are summed once in a step.
FSDP + CPU offload: shards of weights are copied to the device before a gather, shards of gradients to the host after a
reduction. The second copy of a gradient in a step is awaited by the host, which then adds it, so that backward does not
overlap with it (`foreach_reduce` of torch). The optimizer runs on the host.
ZeRO-2 + CPU Adam, of DeepSpeed: weights are whole in the type of matrix products; gradients are reduce-scattered and
copied to the host in every micro-batch; the host steps fp32 weights, and ranks gather the stepped weights.
Offload pipeline of one node, as RoundPipe (arXiv 2604.27085): weights stream from the host; every device computes an
equal part of each micro-batch, without bubbles, while weights come and gradients go; layers are recomputed.

With several micro-batches in a window, FSDP reduces gradients in the last micro-batch only; before, full gradients
accumulate (section 3.3.4). With `GradientAccumulationPlugin(sync_each_batch=True)` of Accelerate FSDP reduces gradients
in every micro-batch. The loss of Transformers casts all logits to fp32 at once (`logits.float()`), and the backward of
its cross-entropy holds the log-softmax, its gradient and the gradient of the logits, all in fp32 (`FP32_LOGITS`); a
fused loss (`use_liger_kernel=True`) holds as little as the loss of hf_helix. All these ways are tried.

The host issues the same operators as in hf_helix, in `STOCK_ISSUES` times as long; if it takes longer than the
device, its time counts. Left out, in favour of the rivals: hooks on the host, contention between links and copies to
the host, and the size of the host's memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from hf_helix.doctor.amounts.records import GRADIENT, MATMUL, PARAMETER, Amounts, Transfer
from hf_helix.doctor.case import COMPILED, ELEMENT, STOCK, Case
from hf_helix.doctor.estimate import estimate_profile, ring_of, transfer_seconds
from hf_helix.doctor.memory import Memory
from hf_helix.doctor.step import OPTIMIZER_BYTES, Step, layout_of, memory_of_case, model_flops
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

HOST_OPTIMIZER_BYTES, HOST_SUM_BYTES = 28, 12
"""Bytes of the host's memory moved per element by Adam, and by an addition to a gradient."""

FSDP, FSDP_FUSED, HSDP = "FSDP (stock)", "FSDP + compile or Liger", "HSDP, sums in fp32"
FSDP_OFFLOAD = "FSDP + CPU offload"
ZERO2_OFFLOAD, PIPELINE_OFFLOAD = "ZeRO-2 + CPU Adam", "RoundPipe-like offload"
RIVALS = FSDP, FSDP_FUSED, HSDP, FSDP_OFFLOAD, ZERO2_OFFLOAD, PIPELINE_OFFLOAD
ON_HOST = FSDP_OFFLOAD, ZERO2_OFFLOAD, PIPELINE_OFFLOAD  # fp32 weights, gradients and states are on the host


@dataclass(frozen=True)
class RivalStep:
    """A step of a rival: its name in `RIVALS`, whether gradients are reduced in every micro-batch, and whether the loss
    is fused."""

    name: str
    step: Step
    sync_each_batch: bool = False
    fused_loss: bool = False

    @property
    def options(self) -> str:
        """Micro-batches and options, as text."""
        case, named = self.step.case, {"sync_each_batch": self.sync_each_batch, "fused loss": self.fused_loss}
        recompute = [f"recompute {case.recompute}"] if case.recompute != "none" else []
        return ", ".join([f"{case.microbatches} x {case.batch}", *recompute, *(name for name in named if named[name])])


@dataclass(frozen=True)
class _Unit:
    """A layer, fetched and reduced as one unit: seconds of passes and communication, bytes of weights and gradients."""

    forward: float
    backward: float
    fetch: float
    reduce: float
    copying: float  # of gradients into the buffer of a reduction
    weights: int
    gradients: int


class _MicroBatch(NamedTuple):
    """Seconds of forward and backward of a micro-batch."""

    seconds: float  # forward and backward, overlapped with communication
    tail: float  # gradient reduction after backward
    computing: float  # computation without overlap
    sent: float  # communication without overlap
    exposed: float  # communication without concurrent computation, except `tail`


def rival_cases(
    name: str, case: Case, cluster: Cluster, recompute: Sequence[str] = ("none", "full")
) -> Iterator[tuple[Case, bool, bool]]:
    """Yields the cases of a rival, each with `sync_each_batch` and `fused_loss`, which comes with other fused kernels;
    none if the rival is another one on this cluster, or cannot use it."""
    several = cluster.nodes > 1
    if (name == HSDP and (not several or cluster.devices_per_node == 1)) or (name == PIPELINE_OFFLOAD and several):
        return
    syncs = (False, True) if name in (FSDP, FSDP_FUSED, HSDP, FSDP_OFFLOAD) else (True,)
    for fused in {FSDP: (False,), FSDP_FUSED: (True,)}.get(name, (False, True)):
        of_software = replace(case, software=COMPILED if fused else STOCK)
        for mode in recompute:
            if mode == "full" or name != PIPELINE_OFFLOAD:
                yield from ((of_software.changed(recompute=mode), sync, fused) for sync in syncs)


def simulate_rival(
    name: str,
    amounts: Amounts,
    case: Case,
    cluster: Cluster,
    sync_each_batch: bool = False,
    fused_loss: bool = False,
) -> RivalStep:
    """Returns an optimizer step of a rival over all devices. Raises ValueError if the device has no peak for the type
    of matrix products.

    Args:
        name: of the rival, see `RIVALS`.
        amounts: the amounts of a rank of this case.
        case: micro-batches of plain data parallelism.
        cluster: the cluster.
        sync_each_batch: whether gradients are reduced in every micro-batch, and not only in the last.
        fused_loss: whether the loss keeps no logits in fp32.
    """
    layout, host = layout_of(amounts, case), cluster.host
    profile = estimate_profile(amounts, layout, case, cluster)
    shards = cluster.devices_per_node if name == HSDP else cluster.devices
    ring, offloads, size = ring_of(cluster, (shards, 1)), name in ON_HOST, ELEMENT[case.dtype]
    usual = GRADIENT if name == HSDP else size
    summed = ELEMENT.get(case.software.sums, usual)  # bytes of an element of gradients in a reduction
    kind = Kind.INTER_NODE if ring.crosses else Kind.INTRA_NODE

    def link_seconds(method: str, count: float) -> float:
        return transfer_seconds(Transfer("dp", method, ring.sent(int(count))), ring, cluster)

    def unit_of(unit: str) -> _Unit:
        held, seconds, copying = amounts.weights[unit], {"F": 0.0, "B": 0.0}, 0.0
        for entry, _ in layout.graphs[unit].entries():
            seconds[entry[0]] += profile.times[unit, entry]
        elements, gradients = held.all_trained + held.all_frozen, summed * held.all_trained
        fetch, reduce = link_seconds("all_gather", size * elements), link_seconds("reduce_scatter", gradients)
        if name not in (ZERO2_OFFLOAD, PIPELINE_OFFLOAD):  # copies out of a gather, and into a reduction
            gathered = cluster.device.moving_seconds(2 * size * elements)
            seconds["F"] += gathered
            seconds["B"] += gathered if layout.graphs[unit].forward.repeats else 0.0  # others stay gathered
            copying = cluster.device.moving_seconds((size + summed) * held.all_trained)
        if name == FSDP_OFFLOAD:
            fetch += (PARAMETER * held.all_trained + held.frozen_itemsize * held.all_frozen) / shards / host.bandwidth
        if offloads:
            reduce += (GRADIENT if name == FSDP_OFFLOAD else size) * held.all_trained / shards / host.bandwidth
        if name == ZERO2_OFFLOAD:
            fetch = 0.0
        if name == PIPELINE_OFFLOAD:  # a device has an equal part of the weights in a step, and hands values on
            fetch, reduce = (
                size * elements / shards / host.bandwidth / case.microbatches,
                amounts.handed_on / host.bandwidth,
            )
            reduce += GRADIENT * held.all_trained / shards / host.bandwidth / case.microbatches
        return _Unit(seconds["F"], seconds["B"], fetch, reduce, copying, size * elements, gradients)

    units = {unit: unit_of(unit) for unit in layout.graphs}
    in_order = [units[unit] for unit in amounts.model.units]
    trained = sum(amounts.weights[unit].all_trained for unit in amounts.model.units)
    mine, more = trained / shards, case.microbatches - 1
    slow = cluster.slowdowns(Kind.COMPUTE, kind, (0, ring.sent(in_order[1].weights)))
    slow = slow if name != PIPELINE_OFFLOAD else (1.0, 1.0)  # which has no collectives
    adding = HOST_SUM_BYTES * trained / cluster.nodes / host.memory
    waits = name == FSDP_OFFLOAD and sync_each_batch and more > 0
    others = _micro_batch(in_order, slow, sync_each_batch, waits)
    if name == HSDP:
        between = ring_of(cluster, (cluster.nodes, shards))
        sent = [Transfer("dp", "all_reduce", 2 * between.sent(unit.gradients // shards)) for unit in in_order]
        in_order = [
            replace(unit, reduce=unit.reduce + transfer_seconds(each, between, cluster))
            for unit, each in zip(in_order, sent, strict=True)
        ]
    last = _micro_batch(in_order, slow, True, waits)
    sums = last.tail
    if name == ZERO2_OFFLOAD:
        sums += size * mine / host.bandwidth + link_seconds("all_gather", size * trained)
    optimizer = cluster.device.moving_seconds(OPTIMIZER_BYTES * mine, PARAMETER * mine)
    if offloads:
        optimizer = HOST_OPTIMIZER_BYTES * trained / cluster.nodes / host.memory
    entries = sum(len(list(layout.graphs[unit].entries())) for unit in amounts.model.units)
    issuing = STOCK_ISSUES * case.microbatches * entries * cluster.device.issue_seconds
    window = more * (others.seconds + others.tail + (adding if waits else 0.0)) + last.seconds
    step = Step(
        case,
        window=max(window, issuing) if cluster.device.host_runs_ahead else window,
        sums=sums,
        optimizer=optimizer,
        loads={Kind.COMPUTE: case.microbatches * last.computing, kind: more * others.sent + last.sent},
        exposed={kind: more * (others.exposed + others.tail) + last.exposed},
        bubble=0.0,
        memory=_memory(name, amounts, case, in_order, sync_each_batch, fused_loss, shards),
        model_flops=model_flops(amounts, case),
    )
    return RivalStep(name, step, sync_each_batch and name not in (ZERO2_OFFLOAD, PIPELINE_OFFLOAD), fused_loss)


def _micro_batch(units: Sequence[_Unit], slow: tuple[float, float], reduces: bool, waits: bool = False) -> _MicroBatch:
    """Returns forward and backward of a micro-batch, with the slowdowns of computation and communication.

    In every phase computation and communication start together, and the next phase waits for both. The gradients of a
    layer are reduced during backward of the next, or before it if the host `waits` for them.
    """
    if reduces:
        units = [replace(unit, backward=unit.backward + unit.copying) for unit in units]
    first, *layers, last = units
    phases = [(0.0, first.fetch + last.fetch), (first.forward, layers[0].fetch)]
    phases += [(layer.forward, following.fetch) for layer, following in pairwise(layers)]
    phases += [(layers[-1].forward, 0.0), (last.forward + last.backward, layers[-1].fetch)]
    waiting = 0.0
    for layer, fetch in zip(layers[::-1], [*(layer.fetch for layer in layers[-2::-1]), 0.0], strict=True):
        phases.append((layer.backward, fetch + waiting))
        waiting = layer.reduce if reduces and not waits else 0.0
        phases += [(0.0, layer.reduce)] if reduces and waits else []
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


def _memory(
    name: str,
    amounts: Amounts,
    case: Case,
    units: Sequence[_Unit],
    sync_each_batch: bool,
    fused_loss: bool,
    shards: int,
) -> Memory:
    """Returns the memory of a device: its shards of weights, gradients and states, gathered weights of two layers and
    of the ends, gradients of two layers in reduction, and the activations of one micro-batch."""
    held = [amounts.weights[unit] for unit in amounts.model.units]
    trained, frozen = (
        sum(each.all_trained for each in held),
        sum(each.frozen_itemsize * each.all_frozen for each in held),
    )
    accumulates = not sync_each_batch and case.microbatches > 1
    first, *layers, last = units
    largest = sorted(layers, key=lambda unit: unit.weights)[-2:]
    on_device = 0 if name in ON_HOST else 1 / shards
    gathered = units if name == ZERO2_OFFLOAD else (first, last, *largest)
    return Memory(
        weights=on_device * (PARAMETER * trained + frozen),
        gradients=on_device * GRADIENT * trained + accumulates * sum(unit.gradients for unit in units),
        states=on_device * case.state_bytes * trained,
        copies=sum(unit.weights for unit in gathered),
        activations=_activations(amounts, case, fused_loss),
        buffers=sum(unit.gradients for unit in largest),
    )


def _activations(amounts: Amounts, case: Case, fused_loss: bool) -> float:
    """Returns the peak activation bytes of a micro-batch under the loss of Transformers, or a fused loss."""
    own = memory_of_case(amounts, replace(case, microbatches=1)).activations
    if fused_loss:
        return own
    units = amounts.model.units
    kept: Counter[str] = Counter()
    logits = 0
    for (unit, entry), counted in amounts.operators.items():
        if entry.startswith("F."):
            kept[unit] += counted.delta
            products = [kernel.sizes for kernel in counted.kernels if kernel.sort == MATMUL and unit == units[-1]]
            logits += sum(count * rows * columns for count, rows, columns, _ in products)
    in_loss = sum(kept[unit] for unit in units[:-1]) + FP32_LOGITS * ELEMENT["fp32"] * logits
    return max(in_loss, own)
