"""Around the training step, HelixTrainer does what the stock Trainer does: logs, evaluation, checkpoints, callbacks."""

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
from support.comparisons import is_close, plain
from support.derived_models import HOME, gemma2
from support.jobs import Recorder, Stream, build, make_trainer
from support.marks import slow
from support.models import arguments, llama, padded, sequences, tiny
from transformers import EarlyStoppingCallback

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.engine.microbatches import LossScale, WindowMaker
from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.runtime.divided import plain_parameters

# -- what the ranks run ------------------------------------------------------------------------------------------------

LIVENESS = "hf_helix-liveness"  # one a process, however many trainers it has


class Accuracy:
    """Metrics of all predictions at once, or batch by batch."""

    def __init__(self) -> None:
        self.right = self.all = self.rows = 0

    def __call__(self, result: Any, compute_result: bool = True) -> dict[str, float]:
        predictions, labels = (torch.as_tensor(value) for value in (result.predictions, result.label_ids))
        counted = labels != -100
        self.right += int((predictions == labels)[counted].sum())
        self.all += int(counted.sum())
        self.rows += len(labels)
        if not compute_result:
            return {}
        metrics = {"accuracy": self.right / self.all, "rows": self.rows}
        self.__init__()  # type: ignore[misc]
        for name in ("inputs", "losses"):
            value = getattr(result, name, None)
            if value is not None and not isinstance(value, dict):
                metrics[name] = float(torch.as_tensor(value).double().sum())
        return metrics


def follow(
    folder: str,
    helix: dict[str, Any] | None,
    training: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    patience: int = 0,
    optimizer: str = "",
    streamed: bool = False,
    from_init: bool = False,
    metrics: bool = False,
    lengths: tuple[int, ...] = (17,),
    count: int = 24,
) -> dict[str, Any]:
    """Train, and evaluate where the arguments say so: the log, the events, and the checkpoints that are left."""
    changes, recorder = {"num_hidden_layers": 4, **(model or {})}, Recorder()
    made = tiny(**changes)
    rows = sequences(count, lengths=lengths)
    options: dict[str, Any] = {
        **({"model_init": lambda: tiny(**changes)} if from_init else {"model": made}),
        "train_dataset": Stream(rows) if streamed else rows,
        "eval_dataset": sequences(5, lengths=lengths, seed=9),
        "data_collator": padded,
        "callbacks": [recorder, *([EarlyStoppingCallback(patience)] if patience else [])],
    }
    if optimizer.startswith("passed in"):
        kind = torch.optim.Adagrad if optimizer == "passed in with states" else torch.optim.NAdam
        given = kind(made.parameters(), lr=0.01)
        options["optimizers"] = given, torch.optim.lr_scheduler.ExponentialLR(given, 0.9)
    if optimizer == "class":
        options["optimizer_cls_and_kwargs"] = torch.optim.RAdam, {"lr": 0.01, "eps": 1e-6}
    if metrics:
        options["compute_metrics"] = Accuracy()
        options["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1).roll(1, 1)
    trainer = build(folder, helix, training, **options)
    trainer.train()
    return {
        "log": trainer.state.log_history,
        "events": recorder.events,
        "checkpoints": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
        "best": trainer.state.best_global_step,
        "tokens": trainer.state.num_input_tokens_seen,
    }


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


def noisy_losses(folder: str, helix: dict[str, Any], alpha: float | None) -> dict[str, Any]:
    """The losses of a run that learns nothing, and those of its evaluation."""
    training = {"neftune_noise_alpha": alpha, "learning_rate": 0.0, "max_steps": 2, "gradient_accumulation_steps": 2}
    model, rows = llama(num_hidden_layers=2), sequences(8)
    trainer = build(folder, helix, training, model=model, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval": trainer.evaluate()["eval_loss"],
    }


# -- the tests --------------------------------------------------------------------------------------------------------

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
WINDOWS = {"gradient_accumulation_steps": 2}
SMOOTHED = {"label_smoothing_factor": 0.2, **WINDOWS, **EVALUATED}
CASES: dict[str, dict[str, Any]] = {
    "label smoothing": {"training": SMOOTHED},
    "best checkpoints and early stopping": {
        "training": {
            **EVALUATED,
            "max_steps": 40,
            "learning_rate": 0.01,
            "metric_for_best_model": "loss",
            "save_strategy": "best",
            "save_only_model": True,
            "save_total_limit": 2,
        },
        "patience": 1,
    },
    "a rate that follows the evaluation": {
        "training": {
            **EVALUATED,
            "eval_steps": 1,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
        }
    },
    "an optimizer and a schedule passed in": {"training": {"max_steps": 4}, "optimizer": "passed in"},
    "a class of optimizers and its options": {"training": {"max_steps": 4}, "optimizer": "class"},
    "grouped by length": {
        "training": {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2, "max_steps": -1},
        "lengths": (17, 5, 11, 8, 14),
        "count": 12,
    },
    "metrics of everything": {
        "training": {
            **EVALUATED,
            "eval_on_start": True,
            "eval_accumulation_steps": 1,
            "include_for_metrics": ["inputs", "loss"],
            "include_num_input_tokens_seen": "non_padding",
        },
        "metrics": True,
        "lengths": (9, 17),
    },
    "metrics batch by batch": {"training": {**EVALUATED, "batch_eval_metrics": True}, "metrics": True},
    "batches split": {"training": {**EVALUATED, "accelerator_config": {"split_batches": True}}},
    "a stream": {"training": {"max_steps": 4, "accelerator_config": {"dispatch_batches": False}}, "streamed": True},
    "rebalanced by length": {
        "training": {"train_sampling_strategy": "batch_rebalance", "num_train_epochs": 1, "max_steps": -1},
        "lengths": (17, 5, 11, 8, 14),
    },
    "a model made by a function": {"training": {**WINDOWS, "max_steps": 4}, "from_init": True},
    "all tokens counted": {
        "training": {**WINDOWS, "max_steps": 4, "include_num_input_tokens_seen": "all"},
        "lengths": (17, 9),
    },
    "label smoothing of gpt2": {"training": SMOOTHED, "model": {"family": "gpt2"}},
    "adafactor": {"training": {"optim": "adafactor", "max_steps": 4}},
    "an optimizer with states passed in, experts": {
        "training": {"max_steps": 4},
        "model": {"family": "mixtral"},
        "optimizer": "passed in with states",
    },
}
TP, PP, CP, DP, OPTIMIZER = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}, {}, {"shard_optimizer": True}
SMOOTHING, BEST, RATE, PASSED, CLASS, GROUPED, METRICS, BY_BATCH, SPLIT, STREAM, BALANCED, INIT, TOKENS, *_ = CASES
RUNS: list[tuple[str, dict[str, Any]]] = [
    *((name, TP) for name in (SMOOTHING, BEST, METRICS)),
    *((name, DP) for name in (GROUPED, SPLIT, STREAM)),
    (INIT, PP),
]
SLOW_RUNS: list[tuple[str, dict[str, Any]]] = [
    *((name, TP) for name in (RATE, PASSED, CLASS, GROUPED, BY_BATCH, STREAM, INIT, TOKENS)),
    *((name, DP) for name in (SMOOTHING, METRICS, BALANCED, TOKENS)),
    *((name, PP) for name in (SMOOTHING, PASSED, STREAM, TOKENS, "adafactor")),
    *(("label smoothing of gpt2", TP), (SMOOTHING, CP)),
    *((name, OPTIMIZER) for name in (PASSED, CLASS)),
    ("an optimizer with states passed in, experts", {**OPTIMIZER, "ep_size": 2}),
]


@pytest.mark.parametrize(("case", "helix"), [*RUNS, *(slow(*run) for run in SLOW_RUNS)], ids=str)
def test_as_the_stock_trainer(case: str, helix: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """Ranks that share a batch behave as one process, and data-parallel ones as under DDP."""
    expected, _ = stock(follow, 1 if helix.keys() & {"tp_size", "pp_size", "cp_size"} else 2, **CASES[case])
    job = {"folder": str(tmp_path), "helix": {"plan": "sequential", **helix}, **CASES[case]}
    for result in cluster_of(2).run(follow, **job):
        assert is_close(plain(result), plain(expected)), f"{result}\n{expected}"
    if case == BEST:
        assert expected["checkpoints"]
        assert max(entry["step"] for entry in expected["log"]) < 40
    if case == RATE:
        assert len({entry["learning_rate"] for entry in expected["log"] if "loss" in entry}) > 1
    if case == TOKENS:
        assert expected["tokens"] > 0


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


def test_neftune_behind_a_scaled_embedding_is_refused(tmp_path: Path) -> None:
    model, args = gemma2(num_hidden_layers=1), arguments(str(tmp_path), neftune_noise_alpha=1.0)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=1\.0 with an embedding of class Gemma2TextScaledWord"):
        HelixTrainer(model=model, args=args, helix_config=HelixConfig())


@pytest.mark.slow
def test_neftune_in_a_run(cluster_of: Any, tmp_path: Path) -> None:
    """Every micro-batch draws its own, every plan the same, and evaluation none."""
    plain = noisy_losses(str(tmp_path), {"plan": "sequential"}, None)
    alone = noisy_losses(str(tmp_path), {"plan": "sequential"}, 5.0)
    assert alone["eval"] == plain["eval"]
    assert not set(alone["losses"]) & set(plain["losses"])
    np.testing.assert_allclose(alone["losses"], plain["losses"], rtol=0.05)
    runs = [
        cluster_of(2).run(noisy_losses, folder=str(tmp_path), helix={"tp_size": 2, "plan": plan}, alpha=5.0)
        for plan in ("sequential", "greedy")
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[0][1]
