"""The memory of a window on paper is what real ranks count, tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from hf_helix.config import HelixConfig
from hf_helix.engine.on_paper import amounts_of
from hf_helix.engine.synthetic import Workload
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.simulation.memory import peak_of_program
from hf_helix.tuning.measure.memory import peak_bytes

MICROBATCHES, BATCH, LENGTH = 4, 2, 128
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TRIES = 3
"""Times that memory is counted: on a CPU what is sent is freed when it has arrived, so that peaks differ a little."""


def peaks(helix: dict[str, Any], plans: tuple[str, ...], model_type: str) -> dict[str, tuple[int, list[int]]]:
    """What a window needs on paper, and what was counted, of this rank under each plan."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model_config = AutoConfig.for_model(model_type, **MODEL, **(EXPERTS if model_type == "mixtral" else {}))
    config = HelixConfig(**helix, schedule="folded_1f1b")
    work = Workload(model_config, config, torch.device("cpu"))
    window = work.window(MICROBATCHES, BATCH, LENGTH)
    with torch.device("meta"):
        whole = type(work.model)(model_config).train()
    amounts = amounts_of(whole, config, BATCH, LENGTH, backend="gloo")
    found = {}
    for name in plans:
        layout = work.runner.layout
        plan = make_plan(name, rough_profile(layout), model="m", mesh=work.mesh.option_sizes)
        runner = work.runner.with_plan(plan)
        program = runner.program(MICROBATCHES)
        counted = [peak_bytes(runner, window) for _ in range(TRIES)]
        found[name] = peak_of_program(amounts, runner.layout, program), counted
    dist.barrier()
    return found


LAYOUTS = {
    "tp2": ({"tp_size": 2}, "llama"),
    "tp2 selective": ({"tp_size": 2, "recompute": "selective"}, "llama"),
    "tp2 full": ({"tp_size": 2, "recompute": "full"}, "llama"),
    "pp2": ({"pp_size": 2}, "llama"),
    "pp2 full": ({"pp_size": 2, "recompute": "full"}, "llama"),
    "cp2": ({"cp_size": 2}, "llama"),
    "cp2 full": ({"cp_size": 2, "recompute": "full"}, "llama"),
    "ep2": ({"ep_size": 2}, "mixtral"),
    "ep2 full": ({"ep_size": 2, "recompute": "full"}, "mixtral"),
}


@pytest.mark.parametrize(("helix", "model_type"), LAYOUTS.values(), ids=LAYOUTS)
def test_memory_on_paper_is_what_ranks_count(helix: dict[str, Any], model_type: str, cluster_of: Any):
    job = {"helix": helix, "plans": ("sequential", "greedy"), "model_type": model_type}
    for rank, found in enumerate(cluster_of(2).run(peaks, **job)):
        for plan, (expected, counted) in found.items():
            ratios = [expected / each for each in counted]
            assert any(abs(ratio - 1) <= 0.03 for ratio in ratios), (rank, plan, ratios)
