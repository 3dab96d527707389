"""Layouts over two ranks, and one rank of them: `python -m benchmarks.gpu.layouts --folder f 0 1 2`.

In:   the numbers of cases; a process group from the environment.
Out:  for each case a line of JSON in `found.jsonl` of the folder, written by rank 0 (and by any rank that fails), and a
      saved model in a folder of the case's number.
Must hold: every case sees the same micro-batches in each step, whoever computes them.
"""

import argparse
import datetime
import functools
import gc
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.models import Batch, batches, on, targets, tiny
from benchmarks.gpu.windows import engine_on
from hf_helix.config import HelixConfig
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.engine.engine import Engine
from hf_helix.measure import operators as profiler
from hf_helix.planning.plan import search
from hf_helix.planning.rules import dhelix
from hf_helix.runtime.distributed.mesh import mesh_of
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.heartbeat import start_watch

STEPS = 3
MICROBATCHES = 4  # of a step, over all data-parallel ranks
OPTIMIZER = {"lr": 1e-3}
MAX_NORM = 1.0
FOUND = "found.jsonl"
LAYERS = {"num_hidden_layers": 4}  # a pipeline of two ranks folds them into four stages


@dataclass(frozen=True)
class Case:
    """A layout. `options` are those of `HelixConfig`."""

    name: str
    options: dict[str, Any]
    family: str = "llama"
    bf16: bool = False
    model: dict[str, Any] = field(default_factory=lambda: LAYERS)

    @property
    def is_measured(self) -> bool:
        """Whether operators are measured before the first step."""
        return self.options.get("plan") in ("auto", "dhelix", "search")

    @property
    def config(self) -> HelixConfig:
        """Its options."""
        return HelixConfig(**{"cuda_graphs": False, **self.options})

    @property
    def reference(self) -> tuple[str, bool]:
        """What the unsplit model is to run once for all cases like this."""
        return self.family, self.bf16


MEASURED = {"plan": "auto", "tuning_share": 1.0}
CASES = (
    Case("tp2", {"tp_size": 2}),
    Case("tp2 greedy", {"tp_size": 2, "plan": "greedy"}),
    Case("cp2", {"cp_size": 2, "plan": "greedy"}),
    Case("pp2 w", {"pp_size": 2, "schedule": "folded_1f1b", "plan": "greedy"}),
    Case("pp2 dualpipe_v", {"pp_size": 2, "schedule": "dualpipe_v", "plan": "greedy"}),
    Case("pp2 1f1b", {"pp_size": 2, "schedule": "1f1b", "plan": "greedy"}),
    Case("dp2", {}),
    Case("dp2 zero1", {"shard_optimizer": True}),
    Case("dp2 zero1 bf16", {"shard_optimizer": True}, bf16=True),
    Case("dp2 parameters", {"shard_parameters": True, "plan": "greedy"}),
    Case("dp2 parameters bf16", {"shard_parameters": True, "plan": "greedy", "recompute": "full"}, bf16=True),
    Case("ep2", {"ep_size": 2, "plan": "greedy"}, "mixtral"),
    Case("ep2 capacity", {"ep_size": 2, "plan": "greedy", "expert_capacity_factor": 4.0}, "mixtral"),
    Case("tp2 auto", {"tp_size": 2, **MEASURED}),
    Case("tp2 bf16", {"tp_size": 2, "plan": "greedy"}, bf16=True),
    Case("tp2 dhelix", {"tp_size": 2, "plan": "dhelix"}),
    Case("tp2 recompute", {"tp_size": 2, "plan": "greedy", "recompute": "full"}),
    Case("tp2 experts", {"tp_size": 2, "plan": "greedy"}, "mixtral"),
    Case("cp2 all_gather bf16", {"cp_size": 2, "plan": "greedy", "cp_method": "all_gather"}, bf16=True),
    Case("tp2 graphs", {"tp_size": 2, "plan": "greedy", "cuda_graphs": True}),
    Case("cp2 graphs bf16", {"cp_size": 2, "plan": "greedy", "cuda_graphs": True}, bf16=True),
    Case("dp2 graphs", {"cuda_graphs": True}),
    Case("dp2 zero1 graphs bf16", {"shard_optimizer": True, "cuda_graphs": True}, bf16=True),
    Case("pp2 graphs", {"pp_size": 2, "plan": "greedy", "cuda_graphs": True}),
    Case("dp2 parameters graphs bf16", {"shard_parameters": True, "plan": "greedy", "cuda_graphs": True}, bf16=True),
    Case("tp2 auto graphs", {"tp_size": 2, "cuda_graphs": True, **MEASURED}),
    Case("pp2 auto", {"pp_size": 2, "schedule": "auto", **MEASURED}),
    Case("cp2 gemma3", {"cp_size": 2, "plan": "greedy"}, "gemma3"),
    Case("pp2 phi3", {"pp_size": 2, "plan": "greedy"}, "phi3"),
    Case("tp2 gpt_oss bf16", {"tp_size": 2, "plan": "greedy"}, "gpt_oss", bf16=True),
    Case("tp2 deepseek_v3", {"tp_size": 2, "plan": "greedy"}, "deepseek_v3"),
    Case("ep2 qwen2_moe", {"ep_size": 2, "plan": "greedy"}, "qwen2_moe"),
    Case("dp2 parameters olmo2", {"shard_parameters": True, "plan": "greedy"}, "olmo2"),
)


def hurry() -> None:
    """In this process plans need not be good: searches are short, and operators are timed a few times only."""
    search.EFFORT, dhelix.MAX_STATES, profiler.IN_A_ROW = 20_000, 100, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("cases", type=int, nargs="+")
    given = parser.parse_args()
    device = torch.device("cpu" if given.dry else f"cuda:{os.environ['LOCAL_RANK']}")
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if given.dry else "nccl", timeout=datetime.timedelta(seconds=120))
    start_watch()
    hurry()
    for number in given.cases:
        try:
            outcome = run_case(CASES[number], device, given.folder / str(number))
        except BaseException as error:
            said = str(error).strip().splitlines() or [""]
            failure = f"rank {dist.get_rank()}: {type(error).__name__}: {said[0]}"
            _tell(given.folder, {"case": number, "error": failure})
            raise
        if dist.get_rank() == 0:
            _tell(given.folder, {"case": number, **outcome})


def _tell(folder: Path, entry: dict[str, Any]) -> None:
    with (folder / FOUND).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def run_case(case: Case, device: torch.device, folder: Path) -> dict[str, Any]:
    """Save, then train a few steps. Collective."""
    start = time.monotonic()
    mesh = mesh_of(case.config, device)
    count = MICROBATCHES // mesh.dp_size
    autocast_dtype = torch.bfloat16 if case.bf16 else None
    with engine_on(
        functools.partial(tiny, case.family, **case.model), mesh, count, autocast_dtype, **case.options
    ) as engine:
        engine.save_pretrained(folder)
        optimizer = optimizer_of(engine)
        whole = sum(each.numel() for each in engine.model.parameters())
        with plain_parameters():
            stepped = sum(each.numel() for each in optimizer.param_groups[0]["params"])
        losses, norms = train_steps(engine, optimizer, count)
        kept = engine.tuning.chosen if engine.tuning else ""
    del engine
    gc.collect()
    outcome = {"losses": losses, "norms": norms, "kept": kept, "share": stepped / whole}
    return {**outcome, "seconds": time.monotonic() - start}


def train_steps(engine: Engine, optimizer: Any, count: int) -> tuple[list[float], list[float]]:
    """The loss and the norm of the gradient, step by step. Collective.

    Args:
        engine: before its first step.
        optimizer: see `optimizer_of`.
        count: micro-batches that each data-parallel rank takes.
    """
    mesh = engine.mesh
    place = 0 if mesh.dp_group is None else dist.get_rank(mesh.dp_group)
    losses, norms = [], []
    for step in range(STEPS):
        window = window_of(step)
        mine = on(window[place * count : (place + 1) * count], mesh.device)
        scale = LossScale(torch.tensor(mesh.dp_size / targets(window), device=mesh.device), 1 / count)
        engine.session.tune(mine, scale, step)
        loss = torch.stack(engine.session.train_window(mine, scale, step)).sum()
        losses.append(_mean_over(loss, mesh.dp_group, mesh.dp_size))
        norms.append(float(engine.weights.clip_gradients(MAX_NORM)))
        optimizer.step()
        engine.model.zero_grad()
    return losses, norms


def optimizer_of(engine: Engine) -> Any:
    """AdamW in one kernel, as the Trainer's default is, which steps this rank's parts of the parameters where the
    options spread them."""
    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **OPTIMIZER, fused=True)
    engine.weights.step_shards(optimizer)
    return optimizer


def window_of(step: int) -> list[Batch]:
    """The micro-batches of a step, on all ranks together."""
    return batches(MICROBATCHES, lengths=(48, 32), seed=step + 1)


def unsplit_steps(case: Case, device: torch.device, folder: Path) -> tuple[list[float], list[float]]:
    """The same steps of the model as Transformers has it, in this process; saves it before them."""
    model = tiny(case.family, **case.model).train()
    model.save_pretrained(folder)
    model.set_experts_implementation("eager")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses, norms = [], []
    for step in range(STEPS):
        window = window_of(step)
        total = 0.0
        for batch in on(window, device):
            with torch.autocast(device.type, torch.bfloat16, enabled=case.bf16):
                loss = model(**batch, num_items_in_batch=targets(window), use_cache=False).loss
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _mean_over(value: Tensor, group: dist.ProcessGroup | None, size: int) -> float:
    if group is not None:
        dist.all_reduce(value, group=group)
    return float(value) / size


if __name__ == "__main__":
    main()
