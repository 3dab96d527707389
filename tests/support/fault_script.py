"""A training script as a user would write it for machines that fail: it goes on from the last checkpoint there is.

With switches to break it. Started by test_faults.py.
"""

import argparse
import errno
import functools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from support.models import arguments, sequences, tiny
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_helix import HelixTrainer
from hf_helix.checkpoint import files
from hf_helix.operators.parameters.flat_parameter import FlatParameter
from hf_helix.operators.parameters.host_shard import HostLink, HostShard
from hf_helix.runtime.executor import Executor

OUT = "out"


class Rows:
    """Data of which a sample may be broken on one rank."""

    def __init__(self, count: int) -> None:
        self.rows = sequences(count)
        self.reads = -1  # how many more are good; less than 0: all
        self.hangs = False  # whether a broken one is never read, not an error

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads -= 1
        if self.reads == 0 and self.hangs:
            loop()
        if self.reads == 0:
            fail("raise", OSError(errno.EIO, "the samples of this rank cannot be read"))
        return self.rows[index]


def fail(how: str, error: Exception | None = None) -> None:
    print(f"failing at {time.time()}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise error or RuntimeError("this rank is broken")


def before(owner: Any, name: str, action: Callable[[], None], count: int = 0) -> None:
    """Do something before a function is called for the so-manyth time."""
    original, calls = getattr(owner, name), iter(range(10**9))

    @functools.wraps(original)
    def broken(*given: Any, **options: Any) -> Any:
        if next(calls) == count:
            action()
        return original(*given, **options)

    setattr(owner, name, broken)


def full() -> None:
    fail("raise", OSError(errno.ENOSPC, "No space left on device"))


class AtStep(TrainerCallback):
    """Arms a fault when a step begins and the save before is complete. One for each rank, since all wait for a save."""

    def __init__(self, step: int, trainer: HelixTrainer, arm: Callable[[], None]) -> None:
        self.step, self.trainer, self.arm = step, trainer, arm

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.trainer.end_save()
            self.arm()


def kill() -> None:
    fail("kill")


def loop() -> None:
    """Goes on for ever, and gets nowhere."""
    print(f"failing at {time.time()}", flush=True)
    while True:
        time.sleep(0.01)


def stop() -> None:
    print(f"failing at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[Rows], None]] = {
    "in a step": lambda rows: before(Executor, "_compute", kill, 30),
    "in a collective": lambda rows: before(dist, "all_reduce", kill, 1),
    "in a gather of weights": lambda rows: before(FlatParameter, "_fill", kill, 2),
    "in an update on the host": lambda rows: before(HostShard, "cast", kill, 1),
    "in a copy to the host": lambda rows: before(HostLink, "down", kill, 1),
    "in saving the model": lambda rows: before(files, "write_box", kill),
    "in saving adapters": lambda rows: before(PeftModel, "save_pretrained", kill),
    "in saving states": lambda rows: before(dcp.FileSystemWriter, "write_data", kill),
    "before its place": lambda rows: before(files, "publish", kill),
    "in the data": lambda rows: setattr(rows, "reads", 1),
    "no room for the model": lambda rows: before(files, "write_box", full),
    "no room for adapters": lambda rows: before(PeftModel, "save_pretrained", full),
    "no room for states": lambda rows: before(dcp.FileSystemWriter, "write_data", full),
    "for ever in a callback": lambda rows: loop(),
    "for ever in the data": lambda rows: vars(rows).update(reads=1, hangs=True),
    "for ever in an operator": lambda rows: before(Executor, "_compute", loop, 30),
    "stopped": lambda rows: stop(),
}


class KillSometime(TrainerCallback):
    """One rank is killed at a random moment: some time after one of the first steps of this start."""

    def __init__(self, seed: str) -> None:
        draw = random.Random(seed)
        is_victim = draw.randrange(int(os.environ["WORLD_SIZE"])) == int(os.environ["RANK"])
        self.steps, self.seconds = (draw.randrange(3) if is_victim else -2), draw.uniform(0, 0.3)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps -= 1
        if self.steps == -1:
            print(f"killed after {self.seconds:.3f} s in step {state.global_step + 1}", flush=True)
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


class KillInSave(TrainerCallback):
    """One rank is killed at a random moment of a save that takes a while. The first one is complete by then: the second
    waits for it."""

    def __init__(self, seed: str) -> None:
        draw = random.Random(seed)
        is_victim = draw.randrange(int(os.environ["WORLD_SIZE"])) == int(os.environ["RANK"])
        self.step, self.seconds = (draw.randrange(3, 6) if is_victim else -1), draw.uniform(0, 0.3)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            for name in ("write_box", "to_disk"):
                slowed = getattr(files, name)
                setattr(files, name, functools.partial(after_a_while, slowed))
        if state.global_step == self.step:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def after_a_while(call: Callable[..., Any], *given: Any) -> Any:
    time.sleep(0.005)
    return call(*given)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=["", *FAULTS], default="")
    parser.add_argument("--victim", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-steps", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0, help="how many starts are killed")
    parser.add_argument("--kill-in-save", default="", help="the seed of a moment")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--model", type=json.loads, default={}, help="of support.models.tiny")
    parser.add_argument("--training", type=json.loads, default={}, help="further training arguments")
    flags = parser.parse_args()
    rows = Rows(24)
    args = arguments(
        OUT,
        max_steps=flags.steps,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=flags.save_steps,
        save_total_limit=2,
        **flags.training,
    )
    trainer = HelixTrainer(model=tiny(**flags.model), args=args, train_dataset=rows)
    if flags.fault:
        # A save comes after the second step and the fourth one; steps count from 0 here. Data are read a step ahead.
        step, is_victim = 2 if "in the data" in flags.fault else 3, args.process_index == flags.victim
        trainer.add_callback(AtStep(step, trainer, lambda: FAULTS[flags.fault](rows) if is_victim else None))
    last = get_last_checkpoint(OUT) if Path(OUT).is_dir() else None
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if start < flags.kills:
        trainer.add_callback(KillSometime(f"{flags.seed}/{start}"))
    if flags.kill_in_save:
        trainer.add_callback(KillInSave(flags.kill_in_save))
    trainer.train(resume_from_checkpoint=last is not None)
    if trainer.is_world_process_zero():
        print(f"done: {trainer.state.global_step} steps, from {last}, after {start} restarts")


if __name__ == "__main__":
    main()
