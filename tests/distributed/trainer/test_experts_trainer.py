"""Experts that drop, and routers that draw."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from invariant.classes import BALANCED_PHIMOE, Case
from invariant.harness import check
from support.comparisons import assert_same_bits
from support.marks import slow
from support.models import arguments
from support.parity import compare_window
from support.pipeline_jobs import batches_of, make, reference, runner_of, whole_gradients, window_of
from torch import Tensor

from hf_helix.engine.routers import RouterCounts, router_entries
from hf_helix.runtime.microbatch import derive_seed

# -- what the ranks run ------------------------------------------------------------------------------------------------


def kept_in_order(chosen: Tensor, rows: int, num_experts: int, factor: float) -> Tensor:
    """Which choices [tokens, k] of a batch find room: first choices first, then position by position of all rows."""
    tokens, choices = chosen.shape
    room = [math.ceil(factor * tokens * choices / num_experts)] * num_experts
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    length = tokens // rows
    for choice in range(choices):
        for position in range(length):
            for row in range(rows):
                token = row * length + position
                expert = int(chosen[token, choice])
                if room[expert]:
                    room[expert] -= 1
                    kept[token, choice] = True
    return kept


def reference_that_drops(model: dict[str, Any], count: int, lengths: Sequence[int], factor: float) -> dict[str, Any]:
    """Losses and gradients of the unsplit model, whose experts never see what does not fit; and how much that is."""
    dropped: list[float] = []

    def drop(experts: Any, given: tuple[Tensor, Tensor, Tensor]) -> Any:
        hidden, chosen, weights = given
        kept = kept_in_order(chosen, 2, len(experts.gate_up_proj), factor)
        dropped.append(1 - kept.float().mean().item())
        return hidden, chosen, weights * kept

    def prepare(made: Any) -> None:
        for layer in made.model.layers:
            layer.mlp.experts.register_forward_pre_hook(drop)

    result = reference(model, batches_of(count, lengths=lengths), prepare)
    return {**result, "dropped": sum(dropped) / len(dropped)}


def reference_that_draws(model: dict[str, Any], count: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Losses and gradients of the unsplit model, one row at a time, whose routers draw what one rank of ours draws."""
    seed, places = arguments("unused").seed, []

    def prepare(made: Any) -> Callable[[int], object]:
        for number, layer in enumerate(made.model.layers):

            def draw_alike(*_: Any, unit: str = f"layers.{number}") -> None:
                torch.manual_seed(derive_seed(seed, 0, places[-1], unit, "mlp.router"))

            layer.mlp.register_forward_pre_hook(draw_alike)
        return places.append

    return reference(model, batches_of(count, rows=1, lengths=lengths), prepare)


def windows(
    folder: str,
    helix: dict[str, Any],
    model: dict[str, Any],
    plans: Sequence[str],
    lengths: Sequence[int],
    rows: int = 2,
) -> list[dict[str, Any]]:
    """A window of three micro-batches for each plan: losses, whole gradients, and what the routers did."""
    trainer = make(folder, helix, model)
    trainer.model.train()
    result = []
    for plan in plans:
        runner = runner_of(trainer, plan, "folded_1f1b")
        window = window_of(trainer, 3, rows, lengths)
        losses = [loss.item() for loss in runner.train_window(window)]
        capped = trainer.helix_config.expert_capacity_factor is not None
        entries = router_entries(RouterCounts(runner.rank_units, trainer.helix.mesh).read(), capped)
        result.append({"losses": losses, "gradients": whole_gradients(trainer), "entries": entries})
        trainer.model.zero_grad()
    trainer.helix.runner.executor.streams.close()
    return result


# -- the tests --------------------------------------------------------------------------------------------------------

BALANCED = {**BALANCED_PHIMOE, "num_hidden_layers": 2}
LENGTHS = (24, 16, 8)


@pytest.mark.parametrize(
    ("ranks", "helix"),
    [
        (1, {}),
        (2, {"ep_size": 2}),
        slow(4, {"ep_size": 2, "pp_size": 2}),
    ],
    ids=str,
)
def test_with_a_capacity_experts_drop_what_a_plain_loop_drops(
    ranks: int, helix: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    model = {**BALANCED, "num_hidden_layers": 2 * helix.get("pp_size", 1)}
    dp = ranks // helix.get("pp_size", 1)
    expected = reference_that_drops(model, 3 * dp, LENGTHS, 1.0)
    assert expected["dropped"] > 0.05
    helix = {**helix, "expert_capacity_factor": 1.0}
    job = {
        "folder": str(tmp_path),
        "helix": helix,
        "model": model,
        "plans": ("greedy", "sequential"),
        "lengths": LENGTHS,
    }
    results = cluster_of(ranks).run(windows, **job)
    for of_plan in zip(*results, strict=True):
        compare_window(of_plan, expected, dp, helix.get("ep_size", 1))
        assert of_plan[0]["entries"]["helix/dropped_tokens"] > 0.05
    assert_same_bits(*results[0])


@pytest.mark.parametrize("layout", ["dp2+ep2", "tp2"])
def test_with_room_for_all_nothing_changes(layout: str, cluster_of: Any, tmp_path: Path) -> None:
    """Static shapes, and padding that takes no place, against the unsplit model."""
    case = Case("phimoe with room", BALANCED, layout, "left", options={"expert_capacity_factor": 2.0})
    check(cluster_of, tmp_path, case, ("sequential", "greedy"))


def test_routers_draw_what_the_unsplit_model_would_draw(tmp_path: Path) -> None:
    """Sparsemixer in training, with noise on the tokens, given the same seeds."""
    model = {**BALANCED, "random": True, "input_jitter_noise": 0.1}
    expected = reference_that_draws(model, 3, LENGTHS)
    compare_window(windows(str(tmp_path), {}, model, ("sequential",), LENGTHS, rows=1), expected, 1)
