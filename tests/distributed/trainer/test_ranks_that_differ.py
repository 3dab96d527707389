"""Ranks that see different things: what one draws all draw, what one decides all do, what one does alone is an error.

The oracle is the stock Trainer with as many processes as there are data-parallel ranks, which all decide the same.
"""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.comparisons import is_close, plain
from support.jobs import build
from support.marks import slow
from support.models import sequences, tiny
from torch.utils.data import default_collate
from transformers import Trainer, TrainerCallback

from hf_helix.runtime.distributed.mesh import rank

Helix = dict[str, Any] | None

PIPELINE = {"pp_size": 2, "schedule": "1f1b"}
SLOW: list[tuple[dict[str, Any], int]] = [({"shard_parameters": True}, 2), (PIPELINE, 1), ({"cp_size": 2}, 1), ({}, 2)]
LAYOUTS = [({"tp_size": 2}, 1), *(slow(*layout) for layout in SLOW)]
"""Options, and the number of data-parallel ranks."""


def made(folder: str, helix: Helix, training: dict[str, Any] | None = None, **options: Any) -> Trainer:
    helix = None if helix is None else {"plan": "sequential", **helix}
    data = {"train_dataset": sequences(24), "eval_dataset": sequences(4, seed=9)}
    layers = 2 * (helix or {}).get("pp_size", 1)
    return build(folder, helix, training, model=tiny(num_hidden_layers=layers), **{**data, **options})


# -- batches ---------------------------------------------------------------------------------------------------------


def draws(rows: list[Any]) -> Any:
    """Leaves out labels at random: by torch, numpy and Python in turn, all of which the stock Trainer seeds."""
    batch = default_collate(rows)
    batch["labels"][:, : int(torch.randint(1, 9, ()))] = -100
    batch["labels"][:, -int(np.random.randint(1, 9)) :] = -100
    return batch


def draw(folder: str, helix: Helix) -> list[Any]:
    """The losses with a collator that draws, in this process and in workers, over two epochs and an evaluation."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon has no workers
    result = []
    for workers in (0, 2):
        training = {"dataloader_num_workers": workers, "max_steps": 3, "gradient_accumulation_steps": 2}
        training |= {"dataloader_multiprocessing_context": "fork"} if workers else {}
        trainer = made(folder, helix, training, data_collator=draws, train_dataset=sequences(8))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        result.append([*losses, trainer.evaluate()["eval_loss"]])
    return result


class DrawsAlone(TrainerCallback):
    """Draws numbers on rank 0 alone, as a script that shows samples."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if rank() == 0:
            random.random()
            np.random.standard_normal()  # the second of a pair is kept for later
            torch.rand(3)

    on_step_begin = on_substep_end = on_step_end


class Shifted(torch.utils.data.Dataset):
    """Rows of several lengths, changed at random whenever they are read."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = [{name: value[: 8 + place % 5] for name, value in row.items()} for place, row in enumerate(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        shift = random.randrange(1, 9)
        return {name: value.roll(shift) for name, value in self.rows[place].items()}


def padded(rows: list[Any]) -> Any:
    """As `draws`, of rows with several lengths."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    pad = lambda name, value: torch.nn.functional.pad(value, (0, longest - len(value)), value=fill[name])  # noqa: E731
    return draws([{name: pad(name, value) for name, value in row.items()} for row in rows])


def noisy(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Weighs tokens by random numbers."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (each * torch.rand(each.shape)).mean() * (1 + float(np.random.rand()))


def draw_alone(folder: str, helix: Helix) -> list[Any]:
    """The losses where rank 0 has drawn numbers after the trainer was made, and draws after every step."""
    result = []
    for own in ({}, {"compute_loss_func": noisy}):
        training = {"max_steps": 3, "gradient_accumulation_steps": 2, "train_sampling_strategy": "group_by_length"}
        data = {"train_dataset": Shifted(sequences(24)), "data_collator": padded}
        trainer = made(folder, helix, training, callbacks=[DrawsAlone()], **data, **own)
        DrawsAlone().on_step_end(None, None, None)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        DrawsAlone().on_step_end(None, None, None)
        result.append([*losses, trainer.evaluate()["eval_loss"]])
    return result


def train_by_rank(folder: str, helix: Helix, gives: str) -> None:
    """Trains with a loss, or with a gradient of the loss, that draws from a generator of this process."""
    generator = torch.Generator()

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        factor, value = 1 + torch.rand((), generator=generator), noisy(outputs, labels)
        return factor * value - (factor - 1) * value.detach() * (gives == "gradient of the loss")

    trainer = made(folder, helix, {"max_steps": 2, "gradient_accumulation_steps": 2}, compute_loss_func=loss_of)
    generator.manual_seed(rank())
    trainer.train()


def evaluate_on_data_of_rank(folder: str, helix: Helix) -> None:
    made(folder, helix).evaluate(sequences(4, seed=rank()))


@pytest.mark.parametrize(("helix", "dp"), LAYOUTS)
def test_collators_that_draw(helix: dict[str, Any], dp: int, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    expected, _ = stock(draw, dp=dp)
    assert expected[0] != expected[1]
    for result in cluster_of(2).run(draw, folder=str(tmp_path), helix=helix):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("helix", "dp"), LAYOUTS)
def test_what_rank_0_draws_alone(helix: dict[str, Any], dp: int, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    expected, _ = stock(draw_alone, dp=dp)
    for result in cluster_of(2).run(draw_alone, folder=str(tmp_path), helix=helix):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("helix", "ranks", "gives"),
    [
        ({"cp_size": 2}, 2, "gradient of the loss"),
        *(slow({f"{axis}_size": 2}, 2, "loss") for axis in ("tp", "pp", "cp")),
        slow({"tp_size": 2, "pp_size": 2}, 4, "loss"),
    ],
    ids=str,
)
def test_losses_of_ranks(helix: dict[str, Any], ranks: int, gives: str, cluster_of: Any, tmp_path: Path) -> None:
    said = f"the {gives} differs between ranks 0 and 1, which share every batch: "
    job = {"folder": str(tmp_path), "helix": helix, "gives": gives}
    cluster_of(ranks).assert_raises(train_by_rank, said, raises="ValueError", **job)


def test_evaluation_on_different_batches(cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}}
    cluster_of(2).assert_raises(evaluate_on_data_of_rank, "got different batches: input_ids, labels differ", **job)


# -- decisions -------------------------------------------------------------------------------------------------------


Decisions = tuple[tuple[str, str], ...]
"""Events of a step, and the flag that is set at each."""


class Decides(TrainerCallback):
    """Sets flags at events of step 2, on one rank or on all, and notes what follows."""

    def __init__(self, decisions: Decisions, decider: int | None) -> None:
        self.decisions, self.decider = decisions, decider
        self.seen: list[Any] = []

    def _at(self, event: str, state: Any, control: Any) -> None:
        if state.global_step == 2 and self.decider in (None, rank()):
            for flag in (flag for at, flag in self.decisions if at == event):
                setattr(control, flag, True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._at("step_begin", state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._at("step_end", state, control)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._at("log", state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(("evaluate", state.global_step))
        self._at("evaluate", state, control)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(("save", state.global_step))
        self._at("save", state, control)


class DecidesInWindows(Decides):
    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._at("substep_end", state, control)


DECISIONS: list[Decisions] = [
    (("step_end", "should_save"), ("step_end", "should_evaluate"), ("step_end", "should_log")),
    (("step_end", "should_epoch_stop"),),
    (("substep_end", "should_training_stop"),),
    (("log", "should_evaluate"), ("evaluate", "should_save"), ("save", "should_training_stop")),  # one leads to another
]


def decide(folder: str, helix: Helix, decisions: Decisions, decider: int | None) -> Any:
    """What follows the decisions: the log, the events, the checkpoints."""
    flags = dict(decisions)
    callback = (DecidesInWindows if "substep_end" in flags else Decides)(decisions, decider)
    training = {"max_steps": 4, "gradient_accumulation_steps": 2, "logging_steps": 2}
    if flags.get("step_end") == "should_log":
        training["logging_steps"] = 100
    trainer = made(folder, helix, training, callbacks=[callback], train_dataset=sequences(12))
    trainer.train()
    saved = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    log = trainer.state.log_history[:-1]  # the last has the mean loss of this rank
    return plain([trainer.state.global_step, log, callback.seen, saved])


@pytest.mark.parametrize(
    ("helix", "dp", "decisions"),
    [
        *(slow({"tp_size": 2}, 1, each, when=place == 1) for place, each in enumerate(DECISIONS)),
        *(slow(*layout, DECISIONS[-1]) for layout in SLOW),
        *(slow({}, 2, each) for each in DECISIONS[:-1]),
    ],
    ids=str,
)
def test_what_callbacks_of_one_rank_decide(
    helix: dict[str, Any], dp: int, decisions: Decisions, cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    expected, _ = stock(decide, dp=dp, decisions=decisions, decider=None)
    for result in cluster_of(2).run(decide, folder=str(tmp_path), helix=helix, decisions=decisions, decider=1):
        assert is_close(result, expected), f"{result}\n{expected}"


# -- signals ---------------------------------------------------------------------------------------------------------


class Preempted(TrainerCallback):
    """Sends SIGTERM to some ranks while they compute a step, and waits a little: the answer has a timer."""

    def __init__(self, ranks: list[int], wait: float) -> None:
        self.ranks, self.wait = ranks, wait

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2 and rank() in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], self.wait)


def preempt(folder: str, helix: Helix, ranks: list[int], of_ones_own: bool) -> Any:
    """A run that SIGTERM ends, with Transformers' answer to it or the user's, and what goes on from its checkpoint."""
    training = {"max_steps": 4, "enable_jit_checkpoint": not of_ones_own, "eval_strategy": "steps", "eval_steps": 3}
    before = signal.getsignal(signal.SIGTERM)
    trainer = made(folder, helix, training, callbacks=[Preempted(ranks, 0.3)])
    if of_ones_own:

        def save_and_stop(*given: Any) -> None:
            trainer.control.should_save = trainer.control.should_training_stop = True

        signal.signal(signal.SIGTERM, save_and_stop)
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "jit_manager", None) is not None:
            callback.jit_manager.kill_wait = 0.05
    trainer.train()
    first, saved = (
        trainer.state.log_history,
        sorted(path.name for path in Path(folder).glob("[!_]*")),
    )  # rank 0 may still hold its claim
    assert of_ones_own or signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, before)
    trainer = made(folder, helix, {**training, "enable_jit_checkpoint": False})
    trainer.train(resume_from_checkpoint=True)
    return saved, *[
        [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
        for log in (first, trainer.state.log_history)
    ]


def losses_by_step(folder: str, helix: Helix) -> list[tuple[int, float]]:
    trainer = made(folder, helix)
    trainer.train()
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("helix", "of_ones_own", "ranks"),
    [({"tp_size": 2}, False, [1]), ({"tp_size": 2}, True, [1]), slow(PIPELINE, False, [0, 1])],
    ids=["enable_jit_checkpoint", "a handler", "enable_jit_checkpoint, on all ranks of a pipeline"],
)
def test_preemption(
    helix: dict[str, Any], of_ones_own: bool, ranks: list[int], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    expected, _ = stock(losses_by_step)
    job = {"folder": str(tmp_path), "helix": helix, "ranks": ranks, "of_ones_own": of_ones_own}
    for saved, before, after in cluster_of(2).run(preempt, **job):
        assert saved == ["checkpoint-3"]
        np.testing.assert_allclose(before, expected[:3], rtol=0, atol=1e-5)
        np.testing.assert_allclose(after, expected, rtol=0, atol=1e-5)


# -- what one rank does alone ----------------------------------------------------------------------------------------


class Does(TrainerCallback):
    """Does something at an event of step 1, on rank 0 alone."""

    def __init__(self, event: str) -> None:
        self.action: Callable[[], Any] = int
        setattr(self, f"on_{event}", self._do)

    def _do(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 1 and state.is_world_process_zero:
            self.action()


ALONE: dict[str, Callable[[Any], Any]] = {
    "step_begin": lambda trainer: trainer.evaluate(),
    "pre_optimizer_step": lambda trainer: trainer.predict(trainer.eval_dataset),
    "step_end": lambda trainer: trainer.save_model(),
    "log": lambda trainer: trainer.measure_memory(),
}


def do_alone(folder: str, helix: Helix) -> dict[str, str]:
    """What is said where rank 0 does something while the others train, and where each does something else."""
    said = {}
    for event, action in ALONE.items():
        callback = Does(event)
        trainer = made(folder, helix, callbacks=[callback])
        callback.action = lambda t=trainer, a=action: a(t)
        with pytest.raises(RuntimeError) as caught:
            trainer.train()
        said[event] = str(caught.value)
    trainer = made(folder, helix)
    with pytest.raises(RuntimeError) as caught:
        trainer.save_model() if dist.get_rank() == 0 else trainer.evaluate()
    made(folder, helix).train()  # the next run of the processes meets nothing of those that failed
    return {**said, "": str(caught.value)}


@pytest.mark.parametrize(("helix", "dp"), LAYOUTS)
def test_what_rank_0_does_alone(helix: dict[str, Any], dp: int, cluster_of: Any, tmp_path: Path) -> None:
    called = dict(zip(ALONE, ["evaluate", "predict", "save_model", "measure_memory"], strict=True))
    for said in cluster_of(2).run(do_alone, folder=str(tmp_path), helix=helix):
        for event, name in called.items():
            assert f"{name}() is called on rank 0 while training goes on after on_{event} on" in said[event]
            assert "write it without `if trainer.is_world_process_zero():`" in said[event]
        assert "trainer.save_model() is called on rank 0 while trainer.evaluate() is called on rank 1" in said[""]
