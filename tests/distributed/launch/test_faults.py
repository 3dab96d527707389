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


def run_into_nan(folder: str, victim: int) -> None:
    """Two data-parallel ranks; the embedding of a token that one of them meets in its second step is broken."""
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "save_steps": 1}
    rows = [{name: value.clamp(max=120) for name, value in row.items()} for row in sequences(8)]
    rows[2 + victim]["input_ids"][5] = 127  # the samples 2 and 3 are those of the second step
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

    with mock.patch("hf_helix.engine.engine.gradient_norm", spoil):
        trainer.train()


ROOM = {
    "for the model": "hf_helix.checkpoint.files.write_box",
    "for states": "hf_helix.checkpoint.training_state.FileSystemWriter.write_data",
    "for generators": "hf_helix.integrations.trainer.checkpoints.generators",
    "on the disk": "hf_helix.checkpoint.files._sync",
}


def run_out_of_room(folder: str, where: str) -> None:
    """Train, and find the disk full in the second save."""
    trainer = make(folder, {"plan": "greedy"})

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Arm(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                stack.enter_context(mock.patch(ROOM[where], fail))

    trainer.add_callback(Arm())
    with contextlib.ExitStack() as stack:
        trainer.train()


# -- the tests --------------------------------------------------------------------------------------------------------

SCRIPT = SUPPORT / "fault_script.py"
SEQUENTIAL = "tp_size: 2\nplan: sequential\n"
SPREAD = "shard_parameters: true\nplan: sequential\n"
KEPT = "shard_optimizer: true\nplan: sequential\n"
PIPELINE = "pp_size: 2\nplan: greedy\n"
HOST = "offload: optimizer\nplan: greedy\n"


class Run(NamedTuple):
    """A run that something may happen to.

    Attributes:
        ranks: how many it has.
        helix: its options, as further lines of YAML.
        model: of `support.models.tiny`.
        training: training arguments.
    """

    ranks: int = 2
    helix: str = ""
    model: str = "{}"
    training: str = "{}"


LLAMA = Run(model='{"num_hidden_layers": 4}')


def ranks_of(folder: Path, *flags: object, helix: str, of: Run = LLAMA) -> list[ForkedRank]:
    options = ("--model", of.model, "--training", of.training)
    return fork_ranks(folder, SCRIPT, *options, *flags, helix=helix + of.helix, world=of.ranks)


def finish(ranks: list[ForkedRank], folder: Path) -> None:
    """Waits for ranks that end well."""
    assert {rank.wait(timeout=150) for rank in ranks} == {0}, (folder / "0.log").read_text()


def losses(folder: Path, step: int) -> list[tuple[int, float]]:
    """By step, from the state of a checkpoint."""
    state = json.loads((folder / OUT / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Run], list[tuple[int, float]]]:
    """The losses of a run that nothing happens to, by its options."""

    @cache
    def run(helix: str, of: Run) -> list[tuple[int, float]]:
        folder = tmp_path_factory.mktemp("sound")
        finish(ranks_of(folder, helix=helix, of=of), folder)
        return losses(folder, 6)

    return run


DIED, UNREADABLE, FULL = "died", "OSError: [Errno 5] the samples of this rank", "No space left on device"
ON_EITHER = {
    **dict.fromkeys(("in saving states", "in saving the model", "in a step", "in a collective"), DIED),
    "in the data": UNREADABLE,
    "no room for the model": FULL,
    "no room for states": FULL,
}
CASES: list[Any] = [
    *((SEQUENTIAL, fault, victim, said) for fault, said in ON_EITHER.items() for victim in (0, 1)),
    (SEQUENTIAL, "before its place", 0, DIED),
    (PIPELINE, "in a step", 0, DIED),
    (PIPELINE, "in a step", 1, DIED),
    (PIPELINE, "in the data", 1, UNREADABLE),
    (SPREAD, "in saving states", 1, DIED),
    (SPREAD, "in saving the model", 0, DIED),
    (SPREAD, "in a step", 1, DIED),
    (SPREAD, "in a gather of weights", 1, DIED),
    (SPREAD, "in a collective", 0, DIED),
    (SPREAD, "no room for the model", 1, FULL),
    (SPREAD, "no room for states", 0, FULL),
    (KEPT, "in saving states", 0, DIED),
    (KEPT, "in saving the model", 1, DIED),
    (KEPT, "in a step", 0, DIED),
    (KEPT, "in a gather of weights", 0, DIED),
    (KEPT, "in a collective", 1, DIED),
    (KEPT, "no room for the model", 0, FULL),
    (KEPT, "no room for states", 1, FULL),
    (f"pp_size: 2\n{HOST}", "in an update on the host", 1, DIED),
    (f"pp_size: 2\n{HOST}", "in a copy to the host", 0, DIED),
    (f"tp_size: 2\n{HOST}", "in an update on the host", 0, DIED),
    (f"shard_optimizer: true\n{HOST}", "in a step", 0, DIED),
    (f"shard_parameters: true\n{HOST}", "in a copy to the host", 1, DIED),
]
# A full disk is a test of its own, below.
QUICK = (f"pp_size: 2\n{HOST}", "in an update on the host", 1, DIED)


@pytest.mark.parametrize(("helix", "fault", "victim", "said"), [slow(*case, when=case != QUICK) for case in CASES])
def test_the_other_rank_ends_and_the_next_run_goes_on(
    helix: str, fault: str, victim: int, said: str, expected: Any, tmp_path: Path
) -> None:
    check_fault(helix, LLAMA, fault, victim, said, expected, tmp_path)


SHARING: dict[str, Run] = {
    "bf16": Run(training='{"bf16": true}'),
    "adapters": Run(model='{"lora": {"lora_dropout": 0.1}}'),
    "ep2": Run(4, "ep_size: 2\n", '{"family": "mixtral"}'),
    "tp2": Run(4, "tp_size: 2\n"),
    "pp2": Run(4, "pp_size: 2\n", LLAMA.model),
}
FAULTS_OF_SHARING = [
    (SPREAD, "in a gather of weights", 0, DIED),
    (SPREAD, "in saving the model", -1, DIED),
    (SPREAD, "no room for states", 1, FULL),
    (KEPT, "in a gather of weights", 1, DIED),
    (KEPT, "in saving states", 0, DIED),
    (KEPT, "no room for the model", -1, FULL),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize(("helix", "fault", "victim", "said"), FAULTS_OF_SHARING)
def test_ranks_that_share_more_than_batches(
    helix: str, fault: str, victim: int, said: str, case: str, expected: Any, tmp_path: Path
) -> None:
    """Parameters or the optimizer, in other layouts and precisions. Adapters are written by the first rank."""
    of = SHARING[case]
    if case == "adapters" and fault.endswith("the model"):
        fault, victim = fault.replace("the model", "adapters"), 0
    check_fault(helix, of, fault, victim % of.ranks, said, expected, tmp_path)


def check_fault(helix: str, of: Run, fault: str, victim: int, said: str, expected: Any, folder: Path) -> None:
    """Every rank ends soon and names the one that has failed; the next run goes on from the checkpoint before.

    Args:
        helix, of: the options of the run.
        fault: one of `support.fault_script.FAULTS`.
        victim: the rank that it happens to.
        said: of it, by the others.
        expected: the losses of the same run when nothing happens to it, see the fixture.
        folder: of the run.
    """
    ranks = ranks_of(folder, "--fault", fault, "--victim", victim, helix=helix, of=of)
    seconds = seconds_until_others_end(ranks, victim)
    logs = [(folder / f"{rank}.log").read_text() for rank in range(of.ranks)]
    assert all(process.returncode != 0 for process in ranks), logs
    assert seconds < LIMIT
    assert "failing at" in logs[victim], logs[victim]
    for log in (log for rank, log in enumerate(logs) if rank != victim):
        assert f"rank {victim}" in log
        assert said in log, log
    assert (folder / OUT / "checkpoint-2").is_dir()
    assert not (folder / OUT / "checkpoint-4").exists()
    finish(ranks_of(folder, helix=helix, of=of), folder)
    assert f"done: 6 steps, from {OUT}/checkpoint-2" in (folder / "0.log").read_text()
    assert losses(folder, 6) == expected(helix, of)
    assert sorted(path.name for path in (folder / OUT).iterdir()) == ["checkpoint-4", "checkpoint-6"]


def restarted(folder: Path, restarts: int, *flags: object) -> str:
    """What a run under torchrun prints that is started again so many times, at most."""
    (folder / "options.yaml").write_text(SEQUENTIAL)
    options = (f"--max_restarts={restarts}", "--monitor_interval=0.2")
    process = torchrun(folder, SCRIPT, *flags, options=options, HELIX_CONFIG_FILE="options.yaml")
    output = output_of(process, 1700)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    """torchrun starts all ranks again, the script goes on by itself, and the losses are those of a quiet run."""
    sound, killed = tmp_path / "sound", tmp_path / "killed"
    for folder in (sound, killed):
        folder.mkdir()
    steps = ("--steps", "200")
    restarted(sound, 0, *steps, "--save-steps", "200")
    output = restarted(killed, 25, *steps, "--save-steps", "1", "--kills", "20")
    assert output.count("killed after") == 20
    assert "after 20 restarts" in output
    assert losses(killed, 200) == losses(sound, 200)


@pytest.mark.parametrize("dp_rank", [slow(0), 1])
def test_a_loss_that_is_not_finite_ends_all_ranks(dp_rank: int, cluster_of: Any, tmp_path: Path) -> None:
    words = f"step 2: the loss of rank {dp_rank} is not finite", "Resume from an earlier checkpoint"
    job = {"raises": "FloatingPointError", "folder": str(tmp_path), "victim": dp_rank}
    cluster_of(2).assert_raises(run_into_nan, *words, **job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"step 2: the norm of the gradient.*max_grad_norm=1\.0"):
        run_into_bad_gradients(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


@pytest.mark.parametrize("where", [slow(w, when=w != "on the disk") for w in ROOM])
def test_a_save_that_fails_leaves_what_was_there(where: str, tmp_path: Path) -> None:
    """In one process; what several ranks do then is among the slow tests."""
    with pytest.raises((OSError, RuntimeError), match="No space left on device"):
        run_out_of_room(str(tmp_path), where)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]
    assert run(str(tmp_path), {"plan": "greedy"}, resume=True)["checkpoints"] == ["checkpoint-2", "checkpoint-4"]
