"""Around the training step, HelixTrainer does what the stock Trainer does: predictions, logs, threads, noise."""

import gc
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.comparisons import compare_predictions
from support.derived_models import HOME
from support.jobs import build, make_trainer, predict
from support.marks import slow
from support.models import arguments, llama, sequences, tiny

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker
from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.runtime.divided import plain_parameters

# -- what the ranks run ------------------------------------------------------------------------------------------------

LIVENESS = "hf_helix-liveness"  # one a process, however many trainers it has


def tasks() -> int:
    """The threads that the system sees in this process."""
    return len(os.listdir("/proc/self/task"))


def threads_left(folder: str, helix: dict[str, Any]) -> tuple[set[str], list[int]]:
    """The threads that trainers of a loop leave behind, by name, and how many the system sees after each of them."""
    before, left, counts = set(threading.enumerate()), set(), []
    for _ in range(3):
        trainer = make_trainer(folder, helix, {"num_hidden_layers": 4}, training={"max_steps": 1})
        trainer.train()
        mine = set(threading.enumerate()) - before
        del trainer
        gc.collect()
        deadline = time.monotonic() + 10
        while any(thread.is_alive() for thread in mine if thread.name != LIVENESS) and time.monotonic() < deadline:
            time.sleep(0.01)
        left |= {thread.name for thread in mine if thread.is_alive()} - {LIVENESS}
        while counts and tasks() > counts[0] and time.monotonic() < deadline:
            time.sleep(0.01)  # the backend ends its own
        counts.append(tasks())
    return left, counts


def board(folder: str, helix: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a folder of its own for every rank, to see who writes."""
    training = {"report_to": ["tensorboard"], "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = sequences(8)
    trainer = build(f"{folder}/{rank}", helix, training, model=llama(), train_dataset=rows, eval_dataset=rows[:3])
    trainer.train()
    return trainer.state.log_history


@plain_parameters()
def noise(folder: str, helix: dict[str, Any], alpha: float, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """What NEFTune adds to this rank's embeddings in training and in evaluation."""
    result: dict[str, Any] = {}
    for given in (None, alpha):
        made = tiny(**{"num_hidden_layers": 4, **(model or {})})
        args = arguments(folder, neftune_noise_alpha=given)
        trainer = HelixTrainer(model=made, args=args, train_dataset=sequences(2), helix_config=HelixConfig(**helix))
        rank_units = trainer.helix.runner.rank_units
        if rank_units.layout.rank_of(0) != rank_units.rank:
            continue
        batch = next(iter(trainer.get_train_dataloader()))
        maker = WindowMaker(trainer.helix.base, trainer.helix.mesh)
        side = maker.microbatch(batch, LossScale(torch.ones(())), (0, 0)).prepare()
        for mode in (True, False):
            made.train(mode)
            with explicit_gradients():
                first = rank_units.all_units[0].graphs.forward.operators[0].name  # the lookup
                (value,) = rank_units.all_units[0].operators[first].forward(OperatorContext(side, 5, mode))
            result.setdefault(mode, []).append(value.numpy().copy())
        result["length"], result["hidden"] = batch["input_ids"].shape[1], made.config.hidden_size
    return result


# -- the tests --------------------------------------------------------------------------------------------------------

PREDICTIONS: dict[str, dict[str, Any]] = {
    "odd number": {"count": 5},
    "lengths differ": {"count": 7, "lengths": (17, 17, 8, 8, 13, 13)},
    "padded left": {"count": 5, "lengths": (17, 9, 13), "padding": "left"},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # ranks, options, the model: pipelines need four layers, and one of five stages holds more than the others
    "tp2": (2, {"tp_size": 2}, {"num_hidden_layers": 3}),
    "cp2": (2, {"cp_size": 2}, {"num_hidden_layers": 3}),
    "pp2, 1f1b": (2, {"pp_size": 2, "schedule": "1f1b"}, {"num_hidden_layers": 5}),
    "pp2 tp2, slices": (4, {"pp_size": 2, "tp_size": 2, "spread_vocabulary": True}, {"num_hidden_layers": 5}),
    "pp2 dp2": (4, {"pp_size": 2, "schedule": "folded_1f1b"}, {"num_hidden_layers": 5}),
    "cp2 tp2": (4, {"cp_size": 2, "tp_size": 2}, {"num_hidden_layers": 3}),
    "pp2 tp2 dp2": (8, {"pp_size": 2, "tp_size": 2, "schedule": "dualpipe_v"}, {"num_hidden_layers": 5}),
    "tp2, capped logits": (2, {"tp_size": 2}, {"family": f"{HOME}gemma2", "num_hidden_layers": 2}),
}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("padded left", "tp2"),
        ("lengths differ", "cp2"),
        ("odd number", "pp2 tp2, slices"),
        ("lengths differ", "pp2 dp2"),
        *(slow("lengths differ", name) for name in LAYOUTS if name not in ("cp2", "pp2 dp2")),
        *(slow(case, layout) for case in ("odd number", "padded left") for layout in ("pp2, 1f1b", "pp2 tp2 dp2")),
    ],
)
def test_predict_and_evaluate(case: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    """Logits of every sample once and in order, on every rank, also where the last batch is filled up."""
    ranks, helix, model = LAYOUTS[layout]
    given = {"folder": str(tmp_path), "model": model, **PREDICTIONS[case]}
    expected = predict(helix=None, **given)
    for result in cluster_of(ranks).run(predict, helix={"plan": "greedy", **helix}, **given):
        assert result["predicted"]["test_samples"] == PREDICTIONS[case]["count"]
        # The stock loss is a mean over batches, which are others on data-parallel ranks.
        compare_predictions(result, expected, with_loss="dp" not in layout)


@pytest.mark.parametrize("size", [slow("tp_size"), "pp_size"])
def test_trainers_that_are_gone_leave_no_threads(size: str, cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": {size: 2, "plan": "sequential"}}
    for left, (first, *others) in cluster_of(2).run(threads_left, **job):
        assert left == set()
        assert max(others) <= first, others


def test_tensorboard(cluster_of: Any, tmp_path: Path) -> None:
    """Rank 0 writes what it logs, and nobody else writes anything."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = cluster_of(2).run(board, folder=str(tmp_path), helix={"tp_size": 2, "plan": "sequential"})[0]
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    assert file.is_relative_to(tmp_path / "0")
    read = events.EventAccumulator(str(file))
    read.Reload()
    overlapped = "helix/overlapped_fraction"
    names = {"train/loss": "loss", "train/grad_norm": "grad_norm", "eval/loss": "eval_loss"}
    for tag, name in {**names, f"train/{overlapped}": overlapped}.items():
        logged = [(entry["step"], entry[name]) for entry in log if name in entry]
        assert logged, name
        result = [(event.step, event.value) for event in read.Scalars(tag)]
        assert [step for step, _ in result] == [step for step, _ in logged]
        np.testing.assert_allclose([value for _, value in result], [value for _, value in logged], rtol=1e-6)


@pytest.mark.parametrize(
    ("helix", "model"),
    [
        ({"tp_size": 2}, {}),
        ({"pp_size": 2}, {}),
        ({"cp_size": 2}, {}),
        slow({"tp_size": 2}, {"family": f"{HOME}olmo2", "num_hidden_layers": 1}, id="derived"),
    ],
    ids=str,
)
def test_neftune_adds_the_noise_of_the_stock_hook(
    helix: dict[str, int], model: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """Its distribution: uniform within alpha / sqrt(length * hidden), once for every embedding, in training only."""
    alpha, drawn = 5.0, []
    for result in cluster_of(2).run(noise, folder=str(tmp_path), helix=helix, alpha=alpha, model=model):
        if not result:  # a rank without the embedding
            continue
        np.testing.assert_array_equal(*result[False])
        without, with_noise = result[True]
        if (with_noise != without).any():
            drawn.append(with_noise - without)
        bound = alpha / math.sqrt(result["length"] * result["hidden"])
    assert len(drawn) == (2 if "cp_size" in helix else 1)
    for noise_of_rank in drawn:
        assert np.abs(noise_of_rank).max() <= bound * 1.001
        assert np.abs(noise_of_rank).max() > 0.95 * bound
        assert noise_of_rank.var() == pytest.approx(bound**2 / 3, rel=0.1)
    assert len(drawn) == 1 or not np.array_equal(*drawn)
