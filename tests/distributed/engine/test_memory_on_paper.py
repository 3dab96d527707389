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
from hf_helix.operators.communication.transport import Recorder
from hf_helix.operators.moe.row_counts import assuming
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.runtime.runner import Runner
from hf_helix.simulation.memory import peak_of_program
from hf_helix.tuning.measure.memory import peak_bytes
from hf_helix.tuning.measure.overlap import forget_gradients, transports

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
    with assuming(imbalance_of(work.runner, window) if model_type == "mixtral" else 1.0):
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


def imbalance_of(runner: Runner, window: Any) -> float:
    """The most rows that the experts of any rank got in a layer, in parts of an even share."""
    recorder = Recorder(runner.mesh.experts.transport)
    with transports([runner.mesh.experts], [recorder]):
        runner.train_window(window, complete=False)
    forget_gradients(runner)
    most = max(max(map(sum, move.rows)) for move in recorder.moved if move.rows)
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, most)
    return max(found) / (BATCH * LENGTH * EXPERTS["num_experts_per_tok"])


EXACT, NEAR = 0.03, 0.05

LAYOUTS = {
    "tp2": ({"tp_size": 2}, EXACT),
    "tp2 selective": ({"tp_size": 2, "recompute": "selective"}, EXACT),
    "tp2 full": ({"tp_size": 2, "recompute": "full"}, NEAR),
    "pp2": ({"pp_size": 2}, EXACT),
    "pp2 full": ({"pp_size": 2, "recompute": "full"}, NEAR),
    "cp2": ({"cp_size": 2}, EXACT),
    "cp2 full": ({"cp_size": 2, "recompute": "full"}, NEAR),
}


QUICK = ("tp2", "pp2")


@pytest.mark.parametrize(
    ("helix", "bar"),
    [pytest.param(*each, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, each in LAYOUTS.items()],
)
def test_memory_on_paper_is_what_ranks_count(helix: dict[str, Any], bar: float, cluster_of: Any):
    assert_near(cluster_of, helix, "llama", bar)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_of_experts_on_paper_is_enough_for_the_rank_that_gets_most_rows(recompute: str, cluster_of: Any):
    """On paper every layer is as uneven as the most uneven one."""
    found = ratios_of(cluster_of, {"ep_size": 2, "recompute": recompute}, "mixtral")
    for plan in found[0]:
        assert 1 - EXACT <= min(min(each[plan]) for each in found) <= 1.25, (plan, found)


def assert_near(cluster_of: Any, helix: dict[str, Any], model_type: str, bar: float) -> None:
    for rank, found in enumerate(ratios_of(cluster_of, helix, model_type)):
        for plan, ratios in found.items():
            assert any(abs(ratio - 1) <= bar for ratio in ratios), (rank, plan, ratios)


def ratios_of(cluster_of: Any, helix: dict[str, Any], model_type: str) -> list[dict[str, list[float]]]:
    """What is predicted over what is counted: of every rank, by plan, each time."""
    job = {"helix": helix, "plans": ("sequential", "greedy"), "model_type": model_type}
    return [
        {plan: [expected / each for each in counted] for plan, (expected, counted) in found.items()}
        for found in cluster_of(2).run(peaks, **job)
    ]
