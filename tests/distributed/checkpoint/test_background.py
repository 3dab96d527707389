"""Training goes on while a checkpoint is written: the same files, one copy of the slices, never half a checkpoint."""

import contextlib
import errno
import io
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import fork_ranks
from support.launches import SUPPORT
from support.marks import slow
from support.resume_jobs import make
from torch import Tensor
from transformers import TrainerCallback

from hf_helix.checkpoint import background
from hf_helix.checkpoint.direct import BUFFER, DirectFile, after_write
from hf_helix.checkpoint.whole import check_whole, numbered
from hf_helix.integrations.trainer import saving
from hf_helix.runtime.divided import plain_parameters

# -- what the ranks run ------------------------------------------------------------------------------------------------


class Reading(TrainerCallback):
    """A user's callback that may read a folder, so training waits for it."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert Path(args.output_dir, f"checkpoint-{state.global_step}", "helix_state.json").is_file()


class Holding(TrainerCallback):
    """Holds every writer until the step after its save has ended; notes what was there by then, and what `on_save` of
    a tracker saw."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.may_write = threading.Event()
        self.seen: list[tuple[int, list[str]]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, names(self.folder)))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.may_write.set()  # weights have changed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < state.max_steps:
            self.may_write.clear()

    def hold(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def held(*given: Any, **options: Any) -> Any:
            assert self.may_write.wait(60)
            return write(*given, **options)

        return held


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


class Tracker(TrainerCallback):
    """As the trackers of Transformers, which read the folder of the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.seen.append((state.global_step, (folder / "helix_state.json").is_file()))


Tracker.on_save.__module__ = "transformers.integrations.integration_utils"


def save_twice(folder: str, helix: dict[str, Any], changes: bool, **options: Any) -> dict[str, Any]:
    """A run that waits for its saves, and one whose writers are held; what the latter has seen.

    Args:
        changes: whether a callback of the latter may change weights, so that they are copied at once.
    """
    make(f"{folder}/waiting", helix, callbacks=[Reading()], **options).train()
    holding, tracker = Holding(f"{folder}/going on"), Tracker()
    Holding.on_step_begin.__module__ = __name__ if changes else "hf_helix.tests"
    trainer = make(holding.folder, helix, callbacks=[holding, tracker], **options)
    with mock.patch.object(background, "_yield_cores", holding.hold(lambda: None)):
        trainer.train()
    return {"steps": holding.seen, "saves": tracker.seen}


def fail_to_write(folder: str, helix: dict[str, Any], victim: int) -> None:
    """The disk of one rank is full at the second save."""
    trainer = make(folder, helix, training={"save_steps": 1})
    copy = background.Copies.of

    def full(*given: Any, **options: Any) -> Tensor:
        if trainer.state.global_step == 2 and dist.get_rank() == victim:
            stack.enter_context(mock.patch.object(DirectFile, "write_at", out_of_room))
        return copy(*given, **options)

    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()):
        stack.enter_context(mock.patch.object(background.Copies, "of", full))
        trainer.train()


def out_of_room(*given: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """The most bytes of copies at a time."""
    live, peak, lock = 0, 0, threading.Lock()

    def add(count: int) -> None:
        nonlocal live, peak
        with lock:
            live += count
            peak = max(peak, live)

    def counting(self: background.Copies, value: Tensor, is_held: bool = False) -> Tensor:
        made = copy(self, value, is_held)
        add(made.nbytes)
        weakref.finalize(made, add, -made.nbytes)
        return made

    copy = background.Copies.of
    with mock.patch.object(background.Copies, "of", counting):
        yield lambda: peak


def count_copies(folder: str, helix: dict[str, Any]) -> dict[str, int]:
    """The bytes that this rank holds, and those of the copies at their most."""
    trainer = make(folder, helix, training={"save_steps": 1})
    with counted() as peak, contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    optimizer = saving.unwrapped(trainer.optimizer)
    with plain_parameters():
        held = sum(parameter.nbytes for parameter in trainer.helix.runner.rank_units.stepped)
    held += sum(state.nbytes for states in optimizer.state.values() for state in states.values())
    return {"held": held, "copied": peak()}


# -- the tests ---------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp_size": (2, {"tp_size": 2, "plan": "greedy"}, {}),
    "shard_parameters": (2, {"shard_parameters": True, "plan": "sequential"}, {}),
    "shard_optimizer in bf16": (2, {"shard_optimizer": True, "plan": "sequential"}, {"model": {"dtype": "bfloat16"}}),
    "pp_size": (2, {"pp_size": 2, "plan": "sequential"}, {}),
    "offload": (2, {"tp_size": 2, "offload": "optimizer", "plan": "sequential"}, {}),
    "experts": (2, {"ep_size": 2, "plan": "sequential"}, {"model": {"family": "mixtral"}}),
    "sharded experts": (2, {"shard_parameters": True, "plan": "sequential"}, {"model": {"family": "mixtral"}}),
    "adapters": (2, {"tp_size": 2, "plan": "sequential"}, {"model": {"lora": {}}}),
}


@pytest.mark.parametrize("changes", [False, slow(True)])
@pytest.mark.parametrize("name", [slow(name, when=name != "tp_size", id=name) for name in LAYOUTS])
def test_the_files_are_those_of_the_step(name: str, changes: bool, cluster_of: Any, tmp_path: Path) -> None:
    """Weights have changed before anything is written. Trackers see each folder complete, with the state of its step.
    A save waits for the one before, and the end of the run for the last."""
    ranks, helix, options = LAYOUTS[name]
    training = {"max_steps": 5, "save_steps": 2, "logging_strategy": "no"}
    job = {"folder": str(tmp_path), "helix": helix, "training": training, "changes": changes, **options}
    for seen in cluster_of(ranks).run(save_twice, **job):
        assert [step for step, _ in seen["steps"]] == [0, 1, 2, 3, 4]
        assert seen["steps"][2] == (2, [])
        assert seen["steps"][4] == (4, ["checkpoint-2"])
        assert seen["saves"] == [(2, True), (4, True), (5, True)]
    for step in (2, 4, 5):
        one, other = (tmp_path / run / f"checkpoint-{step}" for run in ("waiting", "going on"))
        check_whole(other)
        found = {path.relative_to(one).as_posix() for path in one.rglob("*")}
        assert found == {path.relative_to(other).as_posix() for path in other.rglob("*")}
        for path in sorted(one.rglob("*")):
            if path.suffix in (".safetensors", ".distcp", ".pt"):
                assert path.read_bytes() == (other / path.relative_to(one)).read_bytes(), path


def test_a_writer_that_fails_ends_the_run_by_name(cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2, "plan": "sequential"}, "victim": 1}
    mine, other = reversed(cluster_of(2).errors(fail_to_write, **job))
    assert mine.kind == "OSError"
    assert all(words in mine.message for words in ("No space left on device", "save_total_limit=1")), mine.message
    assert other.kind == "ValueError"
    assert "on rank 1: OSError: [Errno 28] No space left on device" in other.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    check_whole(tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    "helix",
    [
        {"tp_size": 2, "plan": "sequential"},
        slow({"shard_parameters": True, "plan": "sequential"}),
        slow({"plan": "sequential"}),
    ],
    ids=str,
)
def test_one_copy_of_the_slices(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    counts = cluster_of(2).run(count_copies, folder=str(tmp_path), helix=helix)
    assert all(0 < count["copied"] <= count["held"] for count in counts), counts
    if helix == {"plan": "sequential"}:  # of replicas, each copies only what it writes
        assert sum(count["copied"] for count in counts) < 1.1 * counts[0]["held"], counts


def test_training_waits_without_room_for_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holding = Holding(str(tmp_path))
    with mock.patch.object(background, "_free_memory", return_value=1000):
        trainer = make(str(tmp_path), {"plan": "greedy"}, callbacks=[holding])
        trainer.train()
    assert holding.seen[2] == (2, ["checkpoint-2"])
    assert capsys.readouterr().out.count("training waits for its saves: a host has no room") == 1


def test_a_save_of_a_script_is_complete_when_it_returns(tmp_path: Path) -> None:
    """`_save_checkpoint` called by a callback itself, and overridden by a class."""

    class Saving(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer._save_checkpoint(trainer.model, trial=None)
            assert check_whole(tmp_path / f"checkpoint-{state.global_step}")

    trainer = make(str(tmp_path), {"plan": "greedy"}, training={"save_strategy": "no"}, callbacks=[Saving()])
    trainer.train()
    assert len(numbered(tmp_path)) == 4


def test_an_error_of_training_leaves_the_save_that_is_being_written(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                may_write.set()
                raise KeyError("a mistake")

    may_write = threading.Event()
    trainer = make(str(tmp_path), {"plan": "greedy"}, callbacks=[Failing()])
    with mock.patch.object(background, "_yield_cores", may_write.wait), pytest.raises(KeyError, match="a mistake"):
        trainer.train()
    check_whole(tmp_path / "checkpoint-2")


def test_copies_take_the_memory_of_the_save_before() -> None:
    """Contents, and addresses: memory is taken again once its copy is gone, and not before."""
    copies, values = (
        background.Copies(),
        [torch.randn(1 << 19).view(512, -1), torch.arange(3), torch.randn(()).bfloat16()],
    )
    places = []
    for _ in range(3):
        copies.begin()
        made = [copies.of(value) for value in (*values, values[0])]
        assert all(torch.equal(one, other) for one, other in zip(made, values, strict=False))
        places.append({made[0].data_ptr(), made[-1].data_ptr()})
        assert len(places[-1]) == 2
        del made
    assert places[0] == places[1] == places[2]


def test_a_thread_rests_between_writes_until_somebody_waits() -> None:
    pace, wrote, rested = background.Pace(longest=3600.0), threading.Event(), threading.Event()

    def write() -> None:
        with mock.patch.object(background.time, "thread_time", mock.Mock(side_effect=[0.0, 100.0])):
            pace.begin()
            after_write.get()(BUFFER - 1)
            wrote.set()
            after_write.get()(1)
        rested.set()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert wrote.wait(60.0), "less than a buffer is no reason to rest"
    assert not rested.wait(0.5), "100 s of work are an hour of rest"
    pace.end()
    assert rested.wait(60.0)


SCRIPT = SUPPORT / "fault_script.py"


@pytest.mark.parametrize("kills", [1, slow(20)])
def test_killed_while_it_saves(kills: int, tmp_path: Path) -> None:
    """With SIGKILL at random moments of a save: a complete checkpoint each time, and a run that goes on as if nothing
    had happened, to the last digit."""
    helix, flags = "tp_size: 2\nplan: sequential\n", ("--steps", 6, "--save-steps", 1)

    def run(folder: Path, *more: object) -> list[int]:
        ranks = fork_ranks(folder, SCRIPT, *flags, *more, helix=helix)
        return [rank.wait(timeout=300) for rank in ranks]

    assert run(tmp_path / "sound") == [0, 0]
    for number in range(kills):
        folder = tmp_path / str(number)
        statuses = run(folder, "--kill-in-save", number)
        assert 0 not in statuses
        newest = numbered(folder / "out")[0]
        check_whole(newest)
        assert run(folder) == [0, 0]
        assert f"from {newest.relative_to(folder)}" in (folder / "0.log").read_text()
        one, other = (each / "out" / "checkpoint-6" for each in (folder, tmp_path / "sound"))
        assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
        assert losses(one) == losses(other)


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
