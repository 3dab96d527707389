"""Tuning in proportion: a short run is not tuned, a longer one in its midst, and nothing else changes by it."""

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.jobs import make_trainer
from support.models import sequences, tiny
from support.tuning_jobs import hasty, said_in

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.engine.session import Session
from hf_helix.tuning import tuner as tuning
from hf_helix.tuning.budget import FULL, QUICK, SHORT, StepTimer, Tier

# -- what the ranks run ------------------------------------------------------------------------------------------------

MODEL = {"attention_dropout": 0.1}


PICKLED = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""What exchanges objects between ranks."""


@dataclass
class Counts:
    """What happened in a run.

    Attributes:
        measured: grows by one with every measurement of operators.
        pickled: grows by one with every exchange of objects.
        output: what is printed.
    """

    measured: list[int] = field(default_factory=list)
    pickled: list[str] = field(default_factory=list)
    output: io.StringIO = field(default_factory=io.StringIO)


@contextlib.contextmanager
def counted(cache: str, costs: dict[Tier, float]) -> Iterator[Counts]:
    """Under a clock by which every step takes a second, and estimates that are known: work is counted, not timed."""
    counts = Counts()
    usual, train_window, clock = tuning.measure_profile, Session.train_window, [0.0]

    def measure(*args: Any, **kwargs: Any) -> Any:
        counts.measured.append(1)
        return usual(*args, **kwargs)

    def counting(name: str) -> Any:
        exchange = getattr(dist, name)

        def exchange_counted(*args: Any, **kwargs: Any) -> Any:
            counts.pickled.append(name)
            return exchange(*args, **kwargs)

        return exchange_counted

    def train_for_a_second(*args: Any, **kwargs: Any) -> Any:
        clock[0] += 1.0
        return train_window(*args, **kwargs)

    def timer() -> StepTimer:
        return StepTimer(clock=lambda: clock[0])

    def cost(wanted: Tier, *args: Any, **kwargs: Any) -> float:
        return costs[wanted]

    with (
        mock.patch.dict(os.environ, {"HELIX_CACHE": cache}),
        mock.patch.object(tuning, "measure_profile", measure),
        mock.patch.multiple(dist, **{name: counting(name) for name in PICKLED}),
        mock.patch("hf_helix.tuning.tuner.tuning_cost", cost),
        mock.patch("hf_helix.tuning.tuner.StepTimer", timer),
        mock.patch.object(Session, "train_window", train_for_a_second),
        hasty(),
        contextlib.redirect_stdout(counts.output),
    ):
        yield counts


def follow(trainer: Any, name: str, counts: Counts) -> list[tuple[int, int]]:
    """For every call of a method: how often was measured until its end, and how often it exchanged objects."""
    usual, calls = getattr(trainer, name), []

    def followed(*args: Any, **kwargs: Any) -> Any:
        before = len(counts.pickled)
        result = usual(*args, **kwargs)
        calls.append((len(counts.measured), len(counts.pickled) - before))
        return result

    setattr(trainer, name, followed)
    return calls


def train(
    folder: str, share: float, cache: str, training: dict[str, Any], helix: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a run found; for every step, how often was measured until then, and objects were exchanged before it and
    within it."""
    with counted(cache, {QUICK: 0.05, SHORT: 1.2, FULL: 2.4}) as counts:
        helix = {**(helix or {"tp_size": 2}), "tuning_share": share}
        model = {**MODEL, "num_hidden_layers": 2 * helix.get("pp_size", 1)}
        trainer: Any = make_trainer(folder, helix, model=model, data={"lengths": (9,)}, training=training)
        before, within = (follow(trainer, name, counts) for name in ("get_batch_samples", "training_step"))
        trainer.train()
    return {
        "measured": [count for count, _ in before],
        "pickled": [count for _, count in before],
        "pickled_within": [count for _, count in within],
        "tier": trainer.tuning and trainer.tuning.tier,
        "rule": trainer.plan.rule,
        "schedule": trainer.helix.runner.scheduler.name,
        "eval": trainer.evaluate()["eval_loss"],
        "said": said_in(counts.output),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def loop(cache: str, share: float, steps: int) -> dict[str, Any]:
    """A loop of one's own that adds up gradients: how often was measured until each step, and their norms."""
    with counted(cache, {QUICK: 1.6, SHORT: 2.1, FULL: 4.1}) as counts:
        AcceleratorState._reset_state()
        plugin = HelixPlugin(HelixConfig(tp_size=2, tuning_share=share, cache=share > 0))
        accelerator = Accelerator(cpu=True, parallelism_config=plugin, gradient_accumulation_steps=2)
        model = plugin.prepare(accelerator, tiny(num_hidden_layers=2), seed=3)
        window = [{key: value[None] for key, value in row.items()} for row in sequences(2, lengths=(9,))]
        result, losses, norms = [], [], []
        for _ in range(steps):
            losses.append(model.train_window(window).item())
            result.append(len(counts.measured))
            norms.append(model.engine.gradient_norm().item())
    return {"measured": result, "losses": losses, "norms": norms, "said": said_in(counts.output)}


# -- the tests --------------------------------------------------------------------------------------------------------


def run(
    cluster: Any, folder: Path, share: float, cache: Path | None = None, helix: Any = None, **training: Any
) -> dict[str, Any]:
    """Five steps of one (imagined) second; of rank 0, where every rank has decided the same."""
    training = {"gradient_accumulation_steps": 2, "max_steps": 5, **training}
    job = {"folder": str(folder), "share": share, "cache": str(cache or folder / "cache"), "training": training}
    job["helix"] = helix
    first, second = cluster.run(train, **job)
    for key in ("tier", "rule", "measured", "losses"):
        assert first[key] == second[key], key
    assert second["said"] == []
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(cluster_of(2), tmp_path_factory.mktemp("plain"), share=0.0)


def test_a_run_of_a_few_steps_is_not_tuned(plain: Any) -> None:
    assert (plain["measured"], plain["rule"]) == ([0] * 5, "greedy")
    (said,) = plain["said"]
    assert said.startswith("hf_helix: plan `greedy`, made from rough estimates: to measure operators and choose ")
    assert " would take about 1 s of the about 3 s of training that are left" in said


@pytest.fixture(scope="module")
def tuned(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run that is tuned, and its cache."""
    folder = tmp_path_factory.mktemp("tuned")
    return run(cluster_of(2), folder, share=0.5), folder / "cache"


@pytest.mark.slow
def test_a_longer_run_is_tuned_in_its_midst(plain: Any, tuned: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Three of five seconds are left when the step time is known; half of that pays for the second of three tiers. A
    run that can afford more measures anew."""
    result, cache = tuned
    assert (result["measured"], result["tier"]) == ([0, 0, 1, 1, 1], SHORT.name)
    before, verdict = result["said"]
    assert before == "hf_helix: measuring and searching plans, about 1 s of about 3 s; cached afterwards"
    assert verdict.startswith(f"hf_helix: plan `{result['rule']}`")
    assert result["losses"] == plain["losses"]
    shutil.copytree(cache, tmp_path / "cache")
    better = run(cluster_of(2), tmp_path, share=0.9)
    assert (better["measured"], better["tier"]) == ([0, 0, 1, 1, 1], FULL.name)


def test_the_next_run_takes_over_what_was_tuned(tuned: Any, cluster_of: Any, tmp_path: Path) -> None:
    """At its first step."""
    result, cache = tuned
    again = run(cluster_of(2), tmp_path, share=0.01, cache=cache)
    assert (again["measured"], again["rule"], again["tier"]) == ([0] * 5, result["rule"], SHORT.name)
    assert again["said"][0].startswith(f"hf_helix: plan `{result['rule']}`")


def test_steps_exchange_no_objects(plain: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Where one micro-batch a step never lets `auto` measure, none at all. Otherwise the first step says what the case
    is, and after 2, 4, ... steps rank 0 says what the rest of the run is worth; both before `training_step`. The third
    window makes the store by which ranks compare their times."""
    alone = run(cluster_of(2), tmp_path, share=0.05, gradient_accumulation_steps=1)
    assert alone["pickled"] == [0] * 5
    assert plain["pickled"][1:] == [0, 1, 0, 1]
    assert alone["pickled_within"] == [0, 0, 1, 0, 0]
    assert sum(plain["pickled_within"]) == 1


def test_a_loop_is_tuned_once_it_has_lasted(cluster_of: Any, tmp_path: Path) -> None:
    """As many steps as there were are expected: after four, half of their time pays for it. Gradients stay."""
    job = {"cache": str(tmp_path), "steps": 6}
    first, second = cluster_of(2).run(loop, share=0.5, **job)
    plain, _ = cluster_of(2).run(loop, share=0.0, **job)
    assert first["measured"] == second["measured"] == [0, 0, 0, 0, 1, 1]
    assert plain["measured"] == [0] * 6
    for key in ("losses", "norms"):
        assert first[key] == plain[key]
    assert plain["norms"][-1] > 5 * plain["norms"][0], "gradients add up"
    assert first["said"][0] == "hf_helix: measuring and searching plans, about 2 s; cached afterwards"
    assert first["said"][1].endswith("(details: print(model.engine.tuning))")


@pytest.mark.slow
def test_a_pipeline_changes_its_schedule_in_the_midst(cluster_of: Any, tmp_path: Path) -> None:
    """Plan and schedule are those that were measured from the third step on; the losses are as if they were not."""
    helix = {"pp_size": 2, "schedule": "auto"}
    plain = run(cluster_of(2), tmp_path / "plain", share=0.0, helix=helix)
    result = run(cluster_of(2), tmp_path / "tuned", share=0.9, helix=helix)
    assert (plain["measured"], result["measured"]) == ([0] * 5, [0, 0, 1, 1, 1])
    assert f"plan `{result['rule']}` on the schedule `{result['schedule']}`" in result["said"][1]
    assert result["losses"] == plain["losses"]
    assert result["eval"] == plain["eval"]
