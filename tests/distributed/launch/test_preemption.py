"""A signal to one rank ends the window of all ranks between micro-batches, and nothing but that window is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.forked_ranks import fork_ranks
from support.launches import SUPPORT
from support.marks import slow
from support.preempt_script import OUT, STEP

from hf_helix.checkpoint.whole import check_whole
from hf_helix.runtime.failures.preemption import Preemption

SCRIPT = SUPPORT / "preempt_script.py"
MOST = 3  # micro-batches that begin after the signal, on any rank

Layout = tuple[str, int, tuple[str, ...]]
LAYOUTS: dict[str, Layout] = {
    "tp": ("tp_size: 2\nplan: greedy\n", 2, ()),
    "sharded": ("shard_parameters: true\nplan: sequential\n", 2, ()),
    "replicas": ("plan: greedy\n", 2, ()),
    "pipeline": ("pp_size: 2\nplan: greedy\n", 2, ()),
    "offload": ("tp_size: 2\noffload: optimizer\nplan: sequential\n", 2, ()),
    "pipeline of tensors": ("pp_size: 2\ntp_size: 2\nplan: sequential\n", 4, ()),
    "a loss of one's own": ("tp_size: 2\nplan: sequential\n", 2, ("--own-loss",)),
    "a process": ("plan: greedy\n", 1, ()),
}


def run(folder: Path, layout: Layout, *flags: object) -> list[dict[str, Any]]:
    helix, world, more = layout
    ranks = fork_ranks(folder, SCRIPT, *more, *flags, helix=helix, world=world)
    assert {rank.wait(timeout=300) for rank in ranks} == {0}, (folder / "0.log").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        slow(name, signal, when=(name, signal) != ("tp", "SIGUSR1"), id=f"{name}, {signal}")
        for name in LAYOUTS
        for signal in ("SIGTERM", "SIGUSR1")
    ],
)
def test_a_signal_ends_the_window(name: str, signal: str, tmp_path: Path) -> None:
    """Of 64 micro-batches, at most three begin after the signal; the run saves the step before, and a run that goes on
    has the losses of a quiet one, to the last digit."""
    layout = LAYOUTS[name]
    (sound, *_) = run(tmp_path / "sound", layout)
    ended = run(tmp_path / "ended", layout, "--signal", signal, "--victim", layout[1] - 1)
    moment = next(seen["signal"] for seen in ended if "signal" in seen)
    for seen in ended:
        later = [place for when, step, place in seen["begun"] if step == STEP and when > moment]
        assert len(later) <= MOST, seen["begun"]
        assert (seen["step"], seen["saved"]) == (STEP, [f"checkpoint-{STEP}"])
        assert seen["losses"] == sound["losses"][:STEP]
        assert seen["train_loss"] == pytest.approx(sum(loss for _, loss in seen["losses"]) / STEP)
    check_whole(tmp_path / "ended" / OUT / f"checkpoint-{STEP}")
    for seen in run(tmp_path / "ended", layout):
        assert [seen[key] for key in ("step", "losses", "tokens")] == [
            sound[key] for key in ("step", "losses", "tokens")
        ]
        assert seen["flos"] == pytest.approx(sound["flos"])


def test_micro_batches_after_a_request() -> None:
    """In one process, without a store: what has begun is the limit."""
    preemption = Preemption()
    assert all(preemption.may_begin(0, place) for place in range(8))
    assert [preemption.may_begin(1, place) for place in (0, 1)] == [True, True]
    preemption.request()
    assert preemption.is_requested
    assert [preemption.may_begin(1, place) for place in (1, 2)] == [True, False]
    assert not preemption.may_begin(2, 0)
