"""Simulated steps as text: one layout in depth, or a table of layouts.

In:   a `Step`, or a `Ranking`.
Out:  lines for a terminal.
Must hold: the text names parts of a step without a figure; every dropped layout has its reason.
"""

from collections.abc import Callable, Iterator, Sequence
from textwrap import fill

from hf_helix.config import AUTO, OFFLOAD, format_rate
from hf_helix.doctor.amounts.records import PARAMETER
from hf_helix.doctor.case import Case
from hf_helix.doctor.estimate import used_rings
from hf_helix.doctor.exactness import error_line, range_of
from hf_helix.doctor.layouts import CLOSE, HEADROOM, Dropped, Ranking, is_plain
from hf_helix.doctor.memory import bytes_text, needs_text
from hf_helix.doctor.step import Step
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.rules.registry import runs_one_strand
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.sizes import Sizes, size_text

TOO_CLOSE = f"; less than {CLOSE:.0%} apart is too close to tell"

MOST_BEGUN = 3  # micro-batches from a signal to the end of a window; a CUDA graph replays all of it
DISK = 1e9  # bytes a second that a node writes, unless it is known better
FEW = 3  # of the layouts that fit: so few say that the model is large for the machine
IDLE = 0.3  # of a window: so much waiting, with little exposed, is for the host to issue operators
EXPOSED = 0.3  # of a step: with this much exposed communication, the links are slow for the model

WIDTH = 116  # columns of lists of layouts


def case_text(case: Case) -> str:
    """Returns the micro-batches of a layout, and its options that save memory."""
    parts = [f"{case.microbatches} x {case.batch}"]
    parts += ["one strand"] if runs_one_strand(case.config.plan) else []
    parts += [f"recompute {case.recompute}"] if case.recompute != "none" else []
    parts += [case.config.schedule] if case.config.schedule != AUTO and case.sizes.pp > 1 else []
    parts += ["layers_per_stage"] if case.config.layers_per_stage else []
    parts += ["spread_vocabulary"] if case.config.spread_vocabulary else []
    capacity = case.config.expert_capacity_factor
    parts += [f"expert_capacity_factor {capacity}"] if capacity is not None else []
    parts += ["shard_optimizer"] if case.config.shard_optimizer else []
    parts += ["shard_parameters"] if case.config.shard_parameters else []
    parts += ["gradients reduced in every micro-batch"] if case.reduces_often else []
    parts += [f"offload {case.config.offload}"] if case.config.offload else []
    parts += [f"float8 {case.config.float8}"] if case.config.float8 else []
    return ", ".join(parts)


def step_lines(step: Step, cluster: Cluster) -> Iterator[str]:
    """Yields the seconds and the memory of a step, by part."""
    case = step.case
    peak = cluster.device.peaks[case.dtype] / 1e12
    yield f"{size_text(case.sizes)} on {cluster.name}: {case_text(case)}, {case.length:,} tokens a sequence"
    yield (
        f"  step          {step.seconds:10.3f} s     {step.tokens_per_second:,.0f} tokens/s of {case.tokens:,} tokens; "
        f"{step.tokens_per_second / cluster.devices:,.0f} tokens/s of a device"
    )
    if cluster.nodes > 1:
        yield f"  network       {_network_text(cluster, case.sizes)}"
    if case.config.layers_per_stage:
        yield f"  layers        {' '.join(f'{count:g}' for count in case.config.layers_per_stage)} on the stages"
    causal, full = step.tflops
    yield (
        f"  TFLOP/s       {causal:10.1f}       MFU {causal / peak:.1%} with causal attention; "
        f"{full:.1f} and {full / peak:.1%} counted as full attention"
    )
    yield f"  window        {step.window:10.3f} s     bubble {step.bubble:.1%}"
    yield f"  sums          {step.sums:10.3f} s     of gradients, after the last backward"
    yield f"  optimizer     {step.optimizer:10.3f} s" + ("     on the hosts" if case.config.offload else "")
    computing = step.loads[Kind.COMPUTE]
    yield f"  computation   {computing:10.3f} s     {computing / step.window:.0%} of the window, on the busiest rank"
    if step.issuing:
        how = "a replay of a CUDA graph" if step.replayed else "to issue its operators"
        yield f"  host          {step.issuing:10.3f} s     of the host for the window: {how}"
    for kind, seconds in step.exposed.items():
        alone = step.loads[kind]
        hidden = max(0.0, 1 - seconds / alone)
        yield f"  {kind.value:<13} {alone:10.3f} s     {seconds:.3f} s of it exposed ({hidden:.0%} hidden)"
    if step.gathers:
        share = step.gathers / step.loads[Kind.COMPUTE]
        what = "copies" if case.streams_weights else "all-gathers"
        yield (
            f"  gathers       {step.gathers:10.3f} s     of it in {what} of weights, forward and backward of "
            f"every micro-batch: {share:.0%} of the computation"
        )
    elif (case.config.shard_optimizer and case.sizes.spread()) or case.config.offload:
        others = "the host has" if case.config.offload else "other ranks have"
        yield f"  gathers       {step.waits:10.3f} s     of the window, for weights that {others} stepped"
    if step.casts:
        yield f"  casts         {step.casts:10.3f} s     of the window, of weights to {case.dtype}, once in it"
    budget = cluster.device.memory
    yield f"  memory        {bytes_text(step.memory.total):>13}    of {bytes_text(budget)} that a run may use"
    for name, count in step.memory.parts().items():
        yield f"    {name:<11} {bytes_text(count):>13}"
    if step.host:
        states = ["weights, states and gradients"] if case.config.offload else []
        held = states + ["inputs of layers"] * (case.recompute == OFFLOAD)
        yield f"  host          {bytes_text(step.host):>13}    of each node, for {' and '.join(held)}"
    yield f"  preemption    {_preemption_text(step, cluster)}"
    if step.memory.total > budget:
        yield "  It does not fit."


def _preemption_text(step: Step, cluster: Cluster) -> str:
    """Returns the seconds from a signal to a whole checkpoint: of the window, and of the writing."""
    case, memory = step.case, step.memory
    begun = step.window if step.replayed else min(MOST_BEGUN / case.microbatches, 1.0) * step.window
    replicas = 1 if case.config.shard_optimizer or case.config.shard_parameters else case.sizes.dp * case.sizes.cp
    each = step.host if case.config.offload else cluster.devices_per_node * (memory.weights + memory.states) / replicas
    return (
        f"{begun + each / DISK:10.3f} s     from a signal to a whole checkpoint: {begun:.3f} s of the window, and "
        f"up to {bytes_text(each)} of each node at {bytes_text(DISK)} a second"
    )


def roomier_text(best: Step, cluster: Cluster) -> str:
    """Returns why another layout than the first is proposed."""
    free = max(0.0, 1 - best.memory.total / cluster.device.memory)
    return (
        f"Proposed, since {size_text(best.case.sizes)} leaves {free:.1%} of the memory free, and this leaves "
        f"{HEADROOM:.0%} or more; too close to tell which is faster"
    )


def training_line(step: Step, tokens: int, cluster: Cluster, experts: int = 1) -> str:
    """Returns the time of a training of some tokens, at the predicted speed of a step, and its range.

    Args:
        step: the step.
        tokens: of the training.
        cluster: the cluster.
        experts: of a layer of the model.
    """
    seconds, (low, high) = tokens / step.tokens_per_second, range_of(step.case, experts)
    unit, length = ("days", 86400) if seconds >= 86400 else ("hours", 3600)
    time, hours = seconds / length, seconds / 3600 * cluster.devices
    return (
        f"  {tokens / 1e9:,.4g}B tokens take {time:,.1f} {unit}, {hours:,.0f} device hours, as predicted,\n"
        f"  and {low * time:,.1f} to {high * time:,.1f} {unit}, {low * hours:,.0f} to {high * hours:,.0f} device hours "
        "with the error of published runs"
    )


def alone_line(step: Step, alone: Step | None, cluster: Cluster) -> str:
    """Returns the speed of a step in parts of one device's; None if the model does not fit one."""
    device = cluster.device.name
    if alone is None:
        return f"  one device    {'':>10}       of {device} does not hold the training"
    ratio = step.tokens_per_second / alone.tokens_per_second
    return (
        f"  one device    {alone.seconds:10.3f} s     {alone.tokens_per_second:,.0f} tokens/s: {cluster.devices} are "
        f"{ratio:.2f}x one {device}, {ratio / cluster.devices:.0%} of {cluster.devices}x"
    )


def checkpoint_line(trained: int, case: Case) -> str:
    """Returns the bytes of a checkpoint: trained weights in fp32, and the states of the optimizer."""
    weights, states = PARAMETER * trained, case.state_bytes * trained
    return (
        f"  checkpoint    {bytes_text(weights + states):>13}    {bytes_text(weights)} of trained weights in fp32, "
        f"{bytes_text(states)} of optimizer states"
    )


def answer_lines(answers: Sequence[tuple[Cluster, int, Step | str]]) -> Iterator[str]:
    """Yields a table of answers: each with its cluster, the tokens of a sequence, and the proposed step or the reason
    for none. Speeds of a device are compared with the first answer's."""
    yield (
        f"{'devices':<9}{'network':<22}{'sequence':>9}  {'layout':<28}{'tokens/s':>11}{'of a device':>13}"
        f"{'of the first':>14}{'memory':>10}"
    )
    first: float | None = None
    for cluster, length, found in answers:
        rate, sharing = format_rate(8 * cluster.network.bandwidth), cluster.network.devices
        network = f"{rate} for {sharing} each" if cluster.nodes > 1 else "one node"
        start = f"{cluster.devices:<9}{network:<22}{length:>9,}  "
        if isinstance(found, str):
            yield start + found
            continue
        speed = found.tokens_per_second / cluster.devices
        first = speed if first is None else first
        yield (
            f"{start}{size_text(found.case.sizes):<28}{found.tokens_per_second:>11,.0f}{speed:>13,.0f}"
            f"{speed / first:>14.0%}{bytes_text(found.memory.total):>10}"
        )


def _network_text(cluster: Cluster, sizes: Sizes) -> str:
    """Returns which axes of a layout have ranks on several nodes, and which stay inside a node."""
    used = used_rings(cluster, sizes)
    across = [
        f"{name} ({ring.within[-1]} neighbouring ranks on a node)" if ring.within[-1] > 1 else name
        for name, ring in used.items()
        if ring.crosses
    ]
    inside = [name for name, ring in used.items() if not ring.crosses]
    return f"between nodes: {', '.join(across)}; inside a node: {', '.join(inside) or 'no axis'}"


def shards_line(best: Step, shared: Step) -> str:
    """Returns the comparison of a step with the same step under `shard_optimizer`, slower and smaller."""
    slower = shared.seconds / best.seconds - 1
    less = bytes_text(best.memory.total - shared.memory.total)
    return (
        f"  shard_optimizer {shared.seconds:8.3f} s     {slower:.1%} slower, with {less} less memory: "
        f"{shared.waits:.3f} s of waiting for weights, {shared.sums:.3f} s of sums, {shared.optimizer:.3f} s to step"
    )


def ranking_lines(ranking: Ranking, cluster: Cluster, top: int, experts: int = 1) -> Iterator[str]:
    """Yields the verdict over all rows, and the table of the best layouts, with plain data parallelism and rivals.

    Args:
        ranking: at least one layout.
        cluster: the cluster.
        top: how many layouts are shown.
        experts: of a layer of the model.
    """
    best, plain, rivals = ranking.steps[0], ranking.plain(), ranking.fitting_rivals(cluster)
    rows = [(size_text(step.case.sizes), _how(step), step) for step in _own_steps(ranking, top)]
    rows += [(each.name, each.options, each.step) for each in rivals]
    fastest = max((step for _, _, step in rows), key=lambda step: step.tokens_per_second)
    if is_plain(best.case) and fastest is best:
        spread = ", with weights that are spread (shard_parameters)," if best.case.config.shard_parameters else ""
        yield f"Plain data parallelism{spread} is the fastest of these: no layer has to be cut."
    elif rivals:
        rival = max(rivals, key=lambda each: each.step.tokens_per_second)
        ratio = best.tokens_per_second / rival.step.tokens_per_second
        close = TOO_CLOSE if max(ratio, 1 / ratio) < 1 + CLOSE else ""
        name = size_text(best.case.sizes)
        if fastest is best:
            yield f"{name} is {ratio:.2f}x as fast as the best rival, {rival.name}{close}."
        else:
            ahead = f"{1 / ratio - 1:.1%} ahead of {name}{close or ': train with that'}"
            yield f"{rival.name} is the fastest of these, {ahead}."
    yield (
        f"{'layout':<28}{'micro-batches':<13}{'tokens':>11}{'tokens/s':>11}{'of best':>9}{'MFU':>7}{'bubble':>8}"
        f"{'exposed':>9}{'sums':>7}{'memory':>10}  options"
    )
    for name, how, step in rows:
        yield _row(name, how, step, fastest, cluster)
    for each in ranking.rivals:
        if each not in rivals:
            yield f"{each.name}: {needs_text(each.step.memory.total, cluster.device.memory)}."
    if plain is None:
        reasons = [each.reason for each in ranking.dropped if is_plain(each.case)]
        yield f"Data parallelism of hf_helix alone does not work: {reasons[0] if reasons else 'no such layout'}."
    if len(ranking.steps) > 1:
        second, *_ = others = ranking.steps[1 : max(2, top)]
        near = [size_text(each.case.sizes) for each in others if _margin(each, best) < CLOSE]
        close = f"; within {CLOSE:.0%} of the first, too close to tell: {', '.join(near)}" if near else ""
        yield f"The second layout is {_margin(second, best):.1%} slower than the first{close}."
    yield from _meanings([how for _, how, _ in rows])
    yield f"{len(ranking.dropped)} layouts cannot be built or do not fit (--why shows them)."
    if any("data sheet" in source for source in cluster.sources.values()):
        yield error_line(best.case, cluster, experts)


def _margin(step: Step, best: Step) -> float:
    return 1 - step.tokens_per_second / best.tokens_per_second


def _own_steps(ranking: Ranking, top: int) -> list[Step]:
    """Returns the steps of the table, plain data parallelism among them, without rivals."""
    plain, shown = ranking.plain(), list(ranking.steps[:top])
    return [*shown, *([plain] if plain is not None and plain not in shown else [])]


def shown_steps(ranking: Ranking, cluster: Cluster, top: int) -> dict[str, Step]:
    """Returns the steps of the table by name."""
    own = {size_text(step.case.sizes): step for step in _own_steps(ranking, top)}
    return own | {each.name: each.step for each in ranking.fitting_rivals(cluster)}


MEANINGS = {
    "one strand": "micro-batches one after the other",
    "recompute selective": "what attention and MLP compute between products runs again in backward",
    "recompute full": "layers run again in backward",
    "recompute offload": "layers run again in backward, and their inputs lie in the memory of the host",
    "offload optimizer": "fp32 weights and optimizer states lie in the memory of the host, which steps them",
    "offload parameters": "all weights and states lie in the memory of the host; weights are copied up for every use",
    "host": "memory of each node's host; compare it with what your nodes have",
    "layers_per_stage": "stages of unequal length",
    "spread_vocabulary": "a slice of embedding and head on every rank of the pipeline",
    "shard_optimizer": "each replica steps a part of the weights",
    "shard_parameters": "each replica holds a part of the weights",
}
"""What the options of a row mean."""


def _meanings(rows: Sequence[str]) -> Iterator[str]:
    """Yields the meaning of the columns, and the options of the rows."""
    columns = (
        "micro-batches: how many x sequences in each, of a data-parallel rank; bubble: a pipeline's rank waits for "
        "computation of others; exposed: communication that nothing hides; sums: of gradients, after the last "
        "backward; memory: of the fullest device"
    )
    used = (f"{name}: {meaning}" for name, meaning in MEANINGS.items() if any(f", {name}" in each for each in rows))
    yield fill(f"{'; '.join([columns, *used])}.", WIDTH)


def help_lines(ranking: Ranking, helps: Callable[[], Sequence[str]]) -> Iterator[str]:
    """Yields advice if few layouts fit, or if links or the host hold up the best.

    Args:
        ranking: the layouts, at least one of them fitting.
        helps: returns options with which the model is trained faster; asked only if few layouts fit or links hold up
            the best.
    """
    best, fitting = ranking.steps[0], len(ranking.steps)
    exposed = sum(best.exposed.values()) / best.seconds
    few = fitting <= min(FEW, len(ranking.dropped))
    if few:
        yield f"Little fits: {fitting} of {fitting + len(ranking.dropped)} layouts."
    if exposed > EXPOSED:
        yield f"The links hold it up: {exposed:.0%} of the best step is exposed."
    elif (idle := 1 - best.bubble - best.loads[Kind.COMPUTE] / best.window) > IDLE and not best.replayed:
        graphs = "cuda_graphs, of experts with --expert_capacity_factor"
        yield f"The host holds it up: the device waits {idle:.0%} of the window for it. What helps: {graphs}."
    if few or exposed > EXPOSED:
        yield from (f"What helps, predicted: {each}." for each in helps())


def _how(step: Step) -> str:
    """Returns the micro-batches and the options of a step, and the memory of the host."""
    return case_text(step.case) + (f", host {bytes_text(step.host)}" if step.host else "")


def _row(name: str, how: str, step: Step, best: Step, cluster: Cluster) -> str:
    """Returns a row of the table of layouts."""
    microbatches, _, options = how.partition(", ")
    peak = cluster.device.peaks[step.case.dtype] / 1e12
    exposed = sum(step.exposed.values()) / step.seconds
    share = step.tokens_per_second / best.tokens_per_second
    return (
        f"{name:<28}{microbatches:<13}{step.case.tokens:>11,}{step.tokens_per_second:>11,.0f}{share:>8.0%} "
        f"{step.tflops[0] / peak:>6.1%}{step.bubble:>8.1%}{exposed:>9.1%}{step.sums / step.seconds:>7.1%}"
        f"{bytes_text(step.memory.total):>10}  {options}"
    ).rstrip()


def dropped_lines(dropped: Sequence[Dropped]) -> Iterator[str]:
    """Yields the reasons for dropped layouts, each with its layouts."""
    layouts: dict[str, list[str]] = {}
    for each in dropped:
        layouts.setdefault(each.reason, []).append(size_text(each.case.sizes))
    for reason, names in layouts.items():
        named = fill(", ".join(names), WIDTH, initial_indent="    ", subsequent_indent="    ")
        yield f"  {reason}:\n{named}"
