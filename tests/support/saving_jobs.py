"""Jobs of test_saving.py."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.models import arguments, tiny
from transformers import TrainerCallback

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.checkpoint import safetensors_file
from hf_helix.tuning.measure.memory import Tally


def save(folder: str, cases: dict[str, dict[str, Any]], apart: bool = False) -> dict[str, dict[str, int]]:
    """Save models that nobody has trained; of each, the bytes that this rank has written and the peak of its tensors.

    Args:
        cases: by folder: the model's `family` and `changes`, the layout `helix`, and `size`, that of a file.
        apart: the folder of each rank is another one of the same name, as on hosts that share none.
    """
    found = {}
    with own_folder(folder, apart):
        for name, case in cases.items():
            model = tiny(case["family"], **case.get("changes", {}))
            trainer = HelixTrainer(model=model, args=arguments(name), helix_config=HelixConfig(**case["helix"]))
            counter = Tally(model.parameters())
            with counted() as written, counter:
                trainer.helix.save_pretrained(name, case.get("size"))
            found[name] = {"written": sum(written), "peak": counter.peak}
            trainer.helix.close()
    return found


@contextlib.contextmanager
def own_folder(folder: str, apart: bool) -> Iterator[None]:
    before, mine = os.getcwd(), Path(folder, str(dist.get_rank()) if apart else "")
    mine.mkdir(exist_ok=True)
    os.chdir(mine)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of what is written."""
    sizes: list[int] = []
    write = safetensors_file._write

    def counting(file: int, data: Any, place: int) -> None:
        sizes.append(data.nbytes)
        write(file, data, place)

    with mock.patch.object(safetensors_file, "_write", counting):
        yield sizes


def run_out_of_room(folder: str, victim: int) -> None:
    """Save twice; the second time the disk is full on one rank, when it writes its third slice."""
    trainer = HelixTrainer(model=tiny(), args=arguments(folder), helix_config=HelixConfig(tp_size=2))
    trainer.save_model()
    write, calls = safetensors_file._write, iter(range(10**9))

    def full(*given: Any) -> None:
        if dist.get_rank() == victim and next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given)

    with mock.patch.object(safetensors_file, "_write", full):
        trainer.save_model()


class Asking(TrainerCallback):
    """Asks for the model's weights after a step, on rank 0 alone, as callbacks do."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.said: dict[str, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            asked = {"model": model, "inside": model.base_model, "copy": copy.deepcopy(model)}
            for name, asking in asked.items():
                self.said |= {f"{name}.{what}": said(call) for what, call in calls(asking, self.folder).items()}


def calls(model: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """What would give a part of the weights, or take the whole."""
    return {
        "save_pretrained": lambda: model.save_pretrained(folder),
        "push_to_hub": lambda: model.push_to_hub("me/model"),
        "state_dict": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "torch.save": lambda: torch.save(model, io.BytesIO()),
        "load_state_dict": lambda: model.load_state_dict({}),
    }


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def ask(folder: str, helix: dict[str, Any], lora: bool) -> tuple[dict[str, str], str]:
    """What a callback is told, and what Accelerate is; the run goes on and saves."""
    model = tiny(lora={} if lora else None, num_hidden_layers=4)
    args = arguments(folder, max_steps=1, save_strategy="steps", save_steps=1)
    rows = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)} for _ in range(8)]
    asking = Asking(f"{folder}/asked")
    config = HelixConfig(plan="sequential", **helix)
    trainer = HelixTrainer(model=model, args=args, train_dataset=rows, helix_config=config, callbacks=[asking])
    trainer.train()
    return asking.said, said(lambda: trainer.accelerator.get_state_dict(trainer.model))
