"""What fails on one rank ends all of them soon, with its name, and the next run goes on from the last checkpoint."""

import contextlib
import errno
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from support.fault_script import OUT
from support.forked_ranks import ForkedRank, fork_ranks
from support.jobs import build
from support.launches import LIMIT, SUPPORT, output_of, seconds_until_others_end, torchrun
from support.marks import slow
from support.models import llama, sequences
from support.resume_jobs import TRAINING, make, run
from transformers import TrainerCallback

from hf_helix.runtime.gradients.reduce import gradient_norm

# -- what the ranks run ------------------------------------------------------------------------------------------------


def run_into_nan(folder: str) -> None:
    """Two data-parallel ranks; the embedding of a token that one of them meets in its second step is broken."""
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "save_steps": 1}
    rows = [{name: value.clamp(max=120) for name, value in row.items()} for row in sequences(8)]
    rows[3]["input_ids"][5] = 127  # the samples 2 and 3 are those of the second step
    model = llama(tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[127] = torch.nan
    training = {**TRAINING, **training, "train_sampling_strategy": "sequential", "weight_decay": 0.0}
    build(folder, {"plan": "sequential"}, training, model=model, train_dataset=rows).train()


def run_into_bad_gradients(folder: str) -> None:
    """A gradient that is infinite in the second step, while all losses are sound."""
    trainer = make(folder, {"plan": "sequential"}, training={"save_steps": 1, "max_grad_norm": 0.0})
    steps = iter(range(100))

    def spoil(*given: Any) -> Any:
        return gradient_norm(*given) * (1.0 if next(steps) == 0 else torch.inf)

    with mock.patch("hf_helix.engine.weights.gradient_norm", spoil):
        trainer.train()


def run_out_of_room(folder: str) -> None:
    """Train, and find the disk full in the second save."""
    trainer = make(folder, {"plan": "greedy"})

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Arm(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                trainer.end_save()  # the one before is complete
                stack.enter_context(mock.patch("hf_helix.checkpoint.files._sync", fail))

    trainer.add_callback(Arm())
    with contextlib.ExitStack() as stack:
        trainer.train()


# -- the tests --------------------------------------------------------------------------------------------------------

SCRIPT = SUPPORT / "fault_script.py"
SEQUENTIAL = "tp_size: 2\nplan: sequential\n"
SPREAD = "shard_parameters: true\nplan: sequential\n"
KEPT = "shard_optimizer: true\nplan: sequential\n"
PIPELINE = "pp_size: 2\nplan: greedy\n"


class Run(NamedTuple):
    """A run that something may happen to.

    Attributes:
        ranks: how many it has.
        helix: its options, as lines of YAML.
        model: of `support.models.tiny`.
        training: training arguments.
    """

    helix: str
    ranks: int = 2
    model: str = '{"num_hidden_layers": 4}'
    training: str = "{}"


def ranks_of(folder: Path, of: Run, *flags: object) -> list[ForkedRank]:
    options = ("--model", of.model, "--training", of.training)
    return fork_ranks(folder, SCRIPT, *options, *flags, helix=of.helix, world=of.ranks)


def finish(ranks: list[ForkedRank], folder: Path) -> None:
    """Waits for ranks that end well."""
    assert {rank.wait(timeout=150) for rank in ranks} == {0}, (folder / "0.log").read_text()


def losses(folder: Path, step: int) -> list[tuple[int, float]]:
    """By step, from the state of a checkpoint."""
    state = json.loads((folder / OUT / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], list[tuple[int, float]]]:
    """The losses of a run that nothing happens to, by its options."""

    @cache
    def run(of: Run) -> list[tuple[int, float]]:
        folder = tmp_path_factory.mktemp("sound")
        finish(ranks_of(folder, of), folder)
        return losses(folder, 6)

    return run


DIED, UNREADABLE, FULL = "died", "OSError: [Errno 5] the samples of this rank", "No space left on device"
TENSORS, STAGES = Run(SEQUENTIAL), Run(PIPELINE)
HOST = Run(f"{PIPELINE}offload: optimizer\n")
EXPERTS = Run(f"ep_size: 2\n{SPREAD}", 4, '{"family": "mixtral"}')
ADAPTERS = Run(KEPT, model='{"lora": {"lora_dropout": 0.1}}')
CASES: list[tuple[Run, str, int, str]] = [
    (TENSORS, "in a step", 0, DIED),
    (TENSORS, "in a collective", 1, DIED),
    (TENSORS, "in saving the model", 0, DIED),
    (TENSORS, "in the data", 0, UNREADABLE),
    (TENSORS, "before its place", 0, DIED),
    (TENSORS, "no room for states", 1, FULL),
    (STAGES, "in a step", 1, DIED),
    (Run(SPREAD, training='{"bf16": true}'), "in a gather of weights", 1, DIED),
    (Run(SPREAD), "no room for the model", 1, FULL),
    (Run(f"tp_size: 2\n{KEPT}", 4), "in saving states", 3, DIED),
    (Run(KEPT), "in a gather of weights", 0, DIED),
    (ADAPTERS, "in saving adapters", 0, DIED),
    (EXPERTS, "in saving the model", 3, DIED),
    (HOST, "in a copy to the host", 0, DIED),
]
QUICK = (HOST, "in an update on the host", 1, DIED)


@pytest.mark.parametrize(("of", "fault", "victim", "said"), [QUICK, *(slow(*case) for case in CASES)])
def test_the_other_ranks_end_and_the_next_run_goes_on(
    of: Run, fault: str, victim: int, said: str, expected: Any, tmp_path: Path
) -> None:
    """Every rank ends soon and names the one that has failed; the next run goes on from the checkpoint before."""
    ranks = ranks_of(tmp_path, of, "--fault", fault, "--victim", victim)
    seconds = seconds_until_others_end(ranks, victim)
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(of.ranks)]
    assert all(process.returncode != 0 for process in ranks), logs
    assert seconds < LIMIT
    assert "failing at" in logs[victim], logs[victim]
    for log in (log for rank, log in enumerate(logs) if rank != victim):
        assert f"rank {victim}" in log
        assert said in log, log
    assert (tmp_path / OUT / "checkpoint-2").is_dir()
    assert not (tmp_path / OUT / "checkpoint-4").exists()
    finish(ranks_of(tmp_path, of), tmp_path)
    assert f"done: 6 steps, from {OUT}/checkpoint-2" in (tmp_path / "0.log").read_text()
    assert losses(tmp_path, 6) == expected(of)
    assert sorted(path.name for path in (tmp_path / OUT).iterdir()) == ["checkpoint-4", "checkpoint-6"]


def restarted(folder: Path, restarts: int, *flags: object) -> str:
    """What a run under torchrun prints that is started again so many times, at most."""
    (folder / "options.yaml").write_text(SEQUENTIAL)
    options = (f"--max_restarts={restarts}", "--monitor_interval=0.2")
    process = torchrun(folder, SCRIPT, *flags, options=options, HELIX_CONFIG_FILE="options.yaml")
    output = output_of(process, 800)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """torchrun starts all ranks again, the script goes on by itself, and the losses are those of a quiet run."""
    sound, killed = tmp_path / "sound", tmp_path / "killed"
    for folder in (sound, killed):
        folder.mkdir()
    restarted(sound, 0, "--steps", "80", "--save-steps", "80")
    output = restarted(killed, 9, "--steps", "80", "--save-steps", "1", "--kills", "6")
    assert output.count("killed after") == 6
    assert "after 6 restarts" in output
    assert losses(killed, 80) == losses(sound, 80)


def test_a_loss_that_is_not_finite_ends_all_ranks(cluster_of: Any, tmp_path: Path) -> None:
    words = "step 2: the loss of rank 1 is not finite", "Resume from an earlier checkpoint"
    job = {"raises": "FloatingPointError", "folder": str(tmp_path)}
    cluster_of(2).assert_raises(run_into_nan, *words, **job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"step 2: the norm of the gradient.*max_grad_norm=1\.0"):
        run_into_bad_gradients(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """In one process; what several ranks do then is among the slow tests."""
    with pytest.raises((OSError, RuntimeError), match="No space left on device"):
        run_out_of_room(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]
    assert run(str(tmp_path), {"plan": "greedy"}, resume=True)["checkpoints"] == ["checkpoint-2", "checkpoint-4"]
