"""Windows from CUDA graphs against the same windows operator by operator: every step the same bits.

What is asked: losses, norms of the gradient and weights after some steps of an optimizer, each on tokens of its own,
are those of an engine without graphs, for every kind of layout that one process can play, with two shapes in turn and
gradients added over windows, and of evaluations between; and the memory of a graph is given back.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu import models
from benchmarks.gpu.models import batches, targets, tiny
from benchmarks.gpu.report import Options, Report
from benchmarks.gpu.timing import release
from benchmarks.gpu.windows import deterministic, engine_on, silent_mesh
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.engine.engine import Engine

STEPS = 4
CASES: tuple[tuple[str, str, dict[str, int], dict[str, Any], bool], ...] = (
    ("one rank", "llama", {}, {}, False),
    ("one rank bf16", "llama", {}, {}, True),
    ("tp2 bf16", "llama", {"tp": 2}, {"plan": "greedy"}, True),
    ("cp2 bf16", "llama", {"cp": 2}, {"plan": "greedy"}, True),
    ("cp2 all_gather", "llama", {"cp": 2}, {"plan": "greedy", "cp_method": "all_gather"}, False),
    ("tp2 recompute bf16", "llama", {"tp": 2}, {"plan": "greedy", "recompute": "full"}, True),
    ("tp2 cp2", "llama", {"tp": 2, "cp": 2}, {"plan": "greedy"}, False),
    ("tied weights", "gpt2", {"tp": 2}, {"plan": "greedy"}, False),
    ("dropout", "gpt2", {"tp": 2}, {"plan": "greedy", "model": {"resid_pdrop": 0.1, "attn_pdrop": 0.1}}, False),
    ("dropout, recompute bf16", "llama", {}, {"recompute": "full", "model": {"attention_dropout": 0.1}}, True),
    ("experts with a capacity", "phimoe", {"ep": 2}, {"plan": "greedy", "expert_capacity_factor": 2.0}, True),
)
"""Name, family, sizes of the axes, options of `HelixConfig` (and "model": of its configuration), whether products are
in bf16."""


def run(report: Report, options: Options) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic GEMMs; read when CUDA starts
    torch.set_float32_matmul_precision("highest")
    for name, family, sizes, changes, bf16 in CASES:
        with report.attempt(name), deterministic():
            wanted, graphed = (
                train(family, sizes, {**changes, "cuda_graphs": on}, bf16, options.device) for on in (False, True)
            )
            tell(report, name, graphed, wanted, on_gpu=options.device.type == "cuda")
    with report.attempt("memory"):
        memory(report, options.device)


def tell(report: Report, name: str, graphed: Any, wanted: Any, on_gpu: bool) -> None:
    """One case: the same losses, norms and weights, and graphs that were there."""
    (count, losses, norms, weights), (_, their_losses, their_norms, their_weights) = graphed, wanted
    differing = [where for where, value in weights.items() if not torch.equal(value, their_weights[where])]
    same = losses == their_losses and norms == their_norms and not differing
    figure = f"{len(losses)} losses, {len(norms)} norms, {len(weights)} weights bit for bit, {count} graphs"
    if not same:
        apart = max(abs(mine - theirs) for mine, theirs in zip(losses, their_losses, strict=True))
        figure = (
            f"losses {apart:.1e} apart, {len(differing)} weights differ {differing[:3]}, norms {norms} {their_norms}"
        )
    report.check(name, same and (count == 3 or not on_gpu), figure)


def train(
    family: str, sizes: dict[str, int], changes: dict[str, Any], bf16: bool, device: torch.device
) -> tuple[int, list[float], list[float], dict[str, torch.Tensor]]:
    """Steps on windows of two shapes in turn, the last two of a step added up: graphs, losses, norms, weights."""
    made = functools.partial(tiny, family, **changes.get("model", {}))
    changes = {name: value for name, value in changes.items() if name != "model"}
    autocast_dtype = torch.bfloat16 if bf16 else None
    with engine_on(made, silent_mesh(device, **sizes), 2, autocast_dtype, **changes) as engine:
        optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-3)
        losses, norms = [], []
        for step in range(STEPS):
            for turn, lengths in enumerate(((48, 33), (64, 48))):
                losses += window(engine, 2 * step + turn, lengths)
                if turn or step % 2:  # every second step adds the gradients of both windows up
                    norms.append(float(engine.weights.clip_gradients(1.0)))
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(evaluated(engine, step))
        count = engine.session.graphs.num_captured if engine.session.graphs is not None else 0
        weights = {name: value.detach().cpu().clone() for name, value in engine.model.named_parameters()}
    return count, losses, norms, weights


def window(engine: Engine, step: int, lengths: Sequence[int]) -> list[float]:
    """The losses of a window of its own tokens."""
    tokens = batches(2, lengths=lengths, seed=step + 1)
    scale = LossScale(torch.tensor(engine.mesh.dp_size / targets(tokens), device=engine.mesh.device), 1 / 2)
    return [loss.item() for loss in engine.session.train_window(models.on(tokens, engine.mesh.device), scale, step)]


def evaluated(engine: Engine, step: int) -> float:
    """The loss of a batch that nothing is learned from."""
    (batch,) = models.on(batches(1, lengths=(48,), seed=100 + step), engine.mesh.device)
    return engine.session.evaluate(batch, LossScale(torch.tensor(0.01, device=engine.mesh.device), 1.0), step)[0].item()


def memory(report: Report, device: torch.device) -> None:
    """Bytes of the device before a graph, with it, and after it was released."""
    if device.type != "cuda":
        return
    options = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    made = functools.partial(tiny, "llama", **options)
    with engine_on(made, silent_mesh(device), 2, torch.bfloat16, cuda_graphs=True) as engine:
        held = []
        for step in range(3):
            window(engine, step, (1024, 1024))
            engine.model.zero_grad()
            torch.cuda.synchronize()
            release()
            held.append(torch.cuda.memory_reserved() / 2**20)
        assert engine.session.graphs is not None
        engine.session.graphs.release()
        release()
        held.append(torch.cuda.memory_reserved() / 2**20)
    figure = ", ".join(
        f"{kind} {value:.0f} MiB"
        for kind, value in zip(("eager", "captured", "replayed", "released"), held, strict=True)
    )
    report.check("memory is given back", held[-1] <= 1.05 * held[0] + 64, figure)
