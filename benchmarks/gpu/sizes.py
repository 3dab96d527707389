"""Windows of large models as one rank of a layout has them: seconds and memory beside the doctor's prediction.

One process plays rank 0; nothing is carried between ranks, so the seconds are those of computation alone. Models have
two layers of the real sizes. Asked for is that the doctor's figure of the memory is at most 10 % off.
"""

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from benchmarks.gpu.links import LoneTransport
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import issue_and_run, release
from benchmarks.gpu.windows import silent_mesh
from hf_helix.config import HelixConfig
from hf_helix.doctor.case import Case as DoctorCase
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import simulate_step
from hf_helix.engine.synthetic import Workload
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import load_cluster
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.runtime.runner import forget_gradients

OFF = 0.10
MICROBATCHES, REPEATS = 2, 3
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@dataclass(frozen=True)
class Case:
    """A model on a layout.

    Attributes:
        model: its configuration, of two layers.
        sizes: of the layout, of which this process is rank 0.
        length: tokens of a sequence; a micro-batch has one.
        options: of `HelixConfig`, besides the sizes.
    """

    name: str
    model: Any
    sizes: Sizes
    length: int
    options: Mapping[str, Any] = field(default_factory=dict)


def llama(**changes: Any) -> LlamaConfig:
    """Llama-3 8B in two layers."""
    return LlamaConfig(**{"vocab_size": 128256, "num_hidden_layers": 2, **LLAMA, **changes})


def qwen(**changes: Any) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B in two layers."""
    return Qwen3MoeConfig(**{"vocab_size": 151936, "num_hidden_layers": 2, **QWEN, **EXPERTS, **changes})


def cases() -> list[Case]:
    """The most telling ones first."""
    tp8, ep8 = Sizes(tp=8), Sizes(dp=8, ep=8)
    capacity = {"expert_capacity_factor": 1.25}  # without one, the ranks that are missing would say their rows
    return [
        Case("Llama-8B tp8", llama(), tp8, 8192),
        Case("Llama-8B tp8 selective", llama(), tp8, 8192, {"recompute": "selective"}),
        Case("Llama-8B tp8 full", llama(), tp8, 8192, {"recompute": "full"}),
        Case("Llama-8B cp2, 32k", llama(), Sizes(cp=2), 32768, {"recompute": "selective"}),
        Case("Qwen3-30B-A3B ep8 capacity", qwen(), ep8, 4096, capacity),
    ]


def dry_cases() -> list[Case]:
    """The same layouts, tiny."""
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    few = {"num_experts": 16, "num_experts_per_tok": 2}
    made = {LlamaConfig: lambda: llama(**small, **heads), Qwen3MoeConfig: lambda: qwen(**small, **heads, **few)}
    return [replace(case, model=made[type(case.model)](), length=64) for case in cases()]


def run(report: Report, options: Options) -> None:
    """Every case."""
    chosen = dry_cases() if options.dry else cases()
    named = ((case.name, functools.partial(_run, report, case, options.device)) for case in chosen)
    report.each(named, 0.75 * options.seconds)


def _run(report: Report, case: Case, device: torch.device) -> None:
    release()
    sizes, on_gpu = case.sizes, device.type == "cuda"
    mesh = silent_mesh(device, sizes.tp, sizes.cp, sizes.ep, made=LoneTransport)
    config = HelixConfig(tp_size=sizes.tp, cp_size=sizes.cp, ep_size=sizes.ep, **case.options)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    work = Workload(case.model, config, device, mesh, autocast_dtype=torch.bfloat16)
    window, times = work.window(MICROBATCHES, 1, case.length), []
    for repeat in range(1 + REPEATS):
        if on_gpu and repeat == 1:
            torch.cuda.reset_peak_memory_stats(device)
        times.append(issue_and_run(lambda: work.runner.train_window(window), device)[1])
        forget_gradients(work.runner)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0

    cluster = load_cluster("h100x8")
    asked = DoctorCase.of(sizes, 1, case.length, MICROBATCHES, plan="sequential", cuda_graphs=False, **case.options)
    simulated = SimulatedModel(case.model, cluster)
    step = simulate_step(simulated.amounts(asked), asked, cluster)
    held = step.memory.total - step.memory.states  # no optimizer is made here
    seconds = statistics.median(times[1:])
    report.note(case.name, f"{seconds:.4f} s of a window, {step.loads[Kind.COMPUTE]:.4f} s of computation predicted")
    figure = f"{peak / 1e9:.2f} GB, {held / 1e9:.2f} GB predicted (at most {OFF:.0%} apart)"
    report.check(f"{case.name}: memory", not on_gpu or abs(held / peak - 1) <= OFF, figure)
