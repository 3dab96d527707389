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
TRIES = 2
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


EXACT, NEAR = 0.03, 0.08

LAYOUTS = {
    "tp2": ({"tp_size": 2}, EXACT),
    "tp2 selective": ({"tp_size": 2, "recompute": "selective"}, EXACT),
    "tp2 full": ({"tp_size": 2, "recompute": "full"}, NEAR),  # 0.955 under greedy
    "pp2": ({"pp_size": 2}, EXACT),
    "pp2 full": ({"pp_size": 2, "recompute": "full"}, NEAR),  # 0.94 under greedy
    "cp2": ({"cp_size": 2}, EXACT),
    "cp2 full": ({"cp_size": 2, "recompute": "full"}, NEAR),  # 0.93 under greedy
}


QUICK = ("tp2", "pp2")


@pytest.mark.parametrize(
    ("helix", "bar"),
    [pytest.param(*each, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, each in LAYOUTS.items()],
)
def test_memory_on_paper_is_what_ranks_count(helix: dict[str, Any], bar: float, cluster_of: Any):
    assert_near(cluster_of, helix, "llama", bar)


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="rows are spread evenly on paper, and 0.68 to 0.88 of what is counted is found")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_of_experts_on_paper_is_what_ranks_count(recompute: str, cluster_of: Any):
    assert_near(cluster_of, {"ep_size": 2, "recompute": recompute}, "mixtral", EXACT)


def assert_near(cluster_of: Any, helix: dict[str, Any], model_type: str, bar: float) -> None:
    job = {"helix": helix, "plans": ("sequential", "greedy"), "model_type": model_type}
    for rank, found in enumerate(cluster_of(2).run(peaks, **job)):
        for plan, (expected, counted) in found.items():
            ratios = [expected / each for each in counted]
            assert any(abs(ratio - 1) <= bar for ratio in ratios), (rank, plan, ratios)
