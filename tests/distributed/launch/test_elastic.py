"""A run whose ranks come and go takes the layout for those that are there, and trains every sample once."""

import json
import random
import re
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.cluster import free_port
from support.elastic_script import OUT, ROWS, SLOWLY, STEP_OF_MOST, TRAINING
from support.forked_ranks import fork_ranks, logs_of
from support.launches import SUPPORT, launch_config, seconds_until_others_end, start
from support.models import arguments, llama, sequences
from torch.distributed import TCPStore
from transformers import Trainer

from hf_helix.config import OWN_STORE

SCRIPT = SUPPORT / "elastic_script.py"
SAMPLES = ROWS * STEP_OF_MOST  # of a step


def stock_losses(folder: Path, steps: int, **changes: Any) -> list[float]:
    """Of the stock Trainer in one process, which nothing happens to."""
    training = {**TRAINING, "max_steps": -1, "logging_steps": 1, **changes}
    args = arguments(str(folder), **{"per_device_train_batch_size": SAMPLES, **training})
    trainer = Trainer(model=llama(num_hidden_layers=4), args=args, train_dataset=sequences(steps * SAMPLES))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_history(folder: Path, steps: int, expected: list[float]) -> list[int]:
    """Compares the losses, and counts the samples; returns the number of ranks in every step."""
    state = json.loads((folder / OUT / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    entries = [entry for entry in state["log_history"] if "samples" in entry]
    assert [entry["step"] for entry in entries] == list(range(1, steps + 1))
    assert {len(entry["samples"]) for entry in entries} == {SAMPLES}
    assert sorted(place for entry in entries for place in entry["samples"]) == list(range(steps * SAMPLES))
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0.0)
    return [entry["world"] for entry in entries]


def test_each_start_takes_its_layout_and_goes_on(tmp_path: Path) -> None:
    """Four ranks, of which one is killed; two, of which one is killed; and four again."""
    layouts = "plan: greedy\nlayouts:\n  4: {tp_size: 2}\n  2: {pp_size: 2}\n"
    for world, step in ((4, 5), (2, 8)):
        ranks = fork_ranks(tmp_path, SCRIPT, "--die-after", step, helix=layouts, world=world)
        seconds_until_others_end(ranks, world - 1)
    first = (tmp_path / "0.log").read_text()
    assert "layouts for 4, 2 ranks: these 2 take pp 2, and 4 micro-batches in a step" in first
    assert f"goes on from {OUT}/checkpoint-4, saved on tp 2 x dp 2" in first
    logs_of(fork_ranks(tmp_path, SCRIPT, helix=layouts, world=4), tmp_path)
    worlds = check_history(tmp_path, 12, stock_losses(tmp_path / "stock", 12))
    assert worlds[:5] == [4] * 4 + [2]
    assert worlds[-4:] == [4] * 4


class Nodes:
    """Launchers on this machine that stand for nodes of a rank each. The store of their rendezvous is in this process,
    so each of them may go.

    Args:
        folder: where they run, and write `NODE.log`.
        words: Python's, up to the script.
        environment: of the launchers. "PORT" stands for the port of the store, here and in the words.
    """

    RENDEZVOUS = "is_host=0,last_call_timeout=2,keep_alive_interval=4,keep_alive_max_attempt=6"

    def __init__(self, folder: Path, words: Sequence[str], **environment: str) -> None:
        self.folder = folder
        self.store = TCPStore("localhost", free_port(), is_master=True, wait_for_workers=False)
        port, own_store = str(self.store.port), dict([OWN_STORE.split("=")])
        self.words = [word.replace("PORT", port) for word in words]
        self.environment = {name: value.replace("PORT", port) for name, value in {**environment, **own_store}.items()}
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.starts = 0

    def start(self, *flags: object) -> None:
        """Starts a node."""
        name = f"node{self.starts}"
        self.starts += 1
        out = (self.folder / f"{name}.log").open("w")
        self.running[name] = start(self.folder, [*self.words, SCRIPT, *flags], output=out, **self.environment)

    def kill(self, draw: random.Random) -> None:
        """Kills all processes of one of the nodes."""
        name = draw.choice(sorted(self.running))
        process = self.running.pop(name)
        node = psutil.Process(process.pid)
        for each in (node, *node.children(recursive=True)):
            each.kill()
        process.wait()

    def steps_on(self, ranks: int) -> int:
        """Returns how many steps so many ranks have trained."""
        return sum(log.read_text().count(f" on {ranks} ranks\n") for log in self.folder.glob("*.log"))

    def wait_for_step(self, ranks: int, limit: float = 400) -> None:
        """Waits until so many ranks have trained a further step."""
        before, until = self.steps_on(ranks), time.monotonic() + limit
        while self.steps_on(ranks) == before:
            ended = {name: each.returncode for name, each in self.running.items() if each.poll() is not None}
            if ended or time.monotonic() > until:
                raise AssertionError(f"no step on {ranks} ranks; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """Returns what all nodes have printed."""
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted(self.folder.glob("*.log")))

    def end(self, limit: float) -> None:
        """Waits for the end of all nodes, which is a good one."""
        statuses = [process.wait(limit) for process in self.running.values()]
        self.running.clear()
        assert not any(statuses), self.logs()


ENDPOINT = "localhost:PORT"
TORCHRUN = [
    *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100"),
    *(
        "--monitor-interval=0.5",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={ENDPOINT}",
        f"--rdzv-conf={Nodes.RENDEZVOUS}",
    ),
]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--config_file=launch.yaml", "--num_machines=1", "--num_processes=2"),
    *("--main_process_port=0", "--rdzv_backend=c10d", f"--rdzv_conf={Nodes.RENDEZVOUS}", "--max_restarts=100"),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("launcher", "ranks", "losses", "steps"), [("torchrun", 1, 10, 500), ("accelerate", 2, 1, 60)])
def test_nodes_are_lost_and_come_back(launcher: str, ranks: int, losses: int, steps: int, tmp_path: Path) -> None:
    """At random moments, now and then before the ranks have met. Nodes have so many `ranks` each."""
    layouts = {1: {}, 2: {"shard_optimizer": True}, 4: {"tp_size": 2}}
    options = {"plan": "greedy", "layouts": {world: layouts[world] for world in (2 * ranks, ranks)}}
    file, draw = launch_config(tmp_path, helix=options), random.Random(launcher)
    if launcher == "torchrun":
        nodes = Nodes(tmp_path, TORCHRUN, HELIX_CONFIG_FILE=file.name)
    else:
        nodes = Nodes(tmp_path, ACCELERATE, PET_NNODES="1:2", PET_RDZV_ENDPOINT=ENDPOINT)
    (tmp_path / SLOWLY).touch()
    training = {"learning_rate": 1e-4, "ddp_timeout": 60, "enable_jit_checkpoint": launcher == "accelerate"}
    flags = ("--steps", steps, "--training", json.dumps(training))
    try:
        nodes.start(*flags)
        nodes.start(*flags)
        for loss in range(losses):
            if loss % 4 != 3:
                nodes.wait_for_step(2 * ranks)
            time.sleep(draw.uniform(0, 3))
            nodes.kill(draw)
            if loss % 4 != 1:
                nodes.wait_for_step(ranks)
            time.sleep(draw.uniform(0, 3))
            nodes.start(*flags)
        nodes.wait_for_step(2 * ranks)
        (tmp_path / SLOWLY).unlink()
        nodes.end(limit=300)
    finally:
        while nodes.running:
            nodes.kill(draw)
    saves_first = training["enable_jit_checkpoint"] and "forcefully exiting" not in nodes.logs()  # on a busy machine
    if saves_first:  # a node that comes back costs no step
        resumed = [int(step) for step in re.findall(rf"goes on from {OUT}/checkpoint-(\d+)", nodes.logs())]
        assert max(resumed) == max(int(step) for step in re.findall(rf"step (\d+) on {ranks} ranks", nodes.logs()))
    worlds = check_history(tmp_path, steps, stock_losses(tmp_path / "stock", steps, learning_rate=1e-4))
    changes = sum(before != after for before, after in pairwise(worlds))
    print(f"{losses} losses, {changes} changes of the layout, {worlds.count(ranks)} of {steps} steps on one node")
    assert changes > losses // 2
