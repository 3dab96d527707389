"""A training script as a user would write it, with one mistake in it. Started by test_endings.py."""

import os
import sys
from pathlib import Path
from typing import Any

from support.models import arguments, llama, sequences
from transformers import TrainerCallback

from hf_helix import HelixConfig, HelixTrainer


def rank() -> int:
    """Also of a process that a notebook has forked."""
    return int(os.environ.get("RANK", "0"))


class Broken(TrainerCallback):
    """What happens at the beginning of the third step."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and rank() == 1 and self.mistake == "callback":
            raise RuntimeError("boom on one rank")
        if state.global_step == 2 and self.mistake in ("interrupt", "preempt"):
            Path(f"stepping-{rank()}").touch()


def main(mistake: str) -> None:
    long = {"max_steps": 10_000, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    runs = {"interrupt": long, "preempt": {**long, "save_strategy": "no", "enable_jit_checkpoint": True}}
    args = arguments("out", gradient_accumulation_steps=2, **runs.get(mistake, {"max_steps": 6}))
    config = HelixConfig(tp_size=4 if mistake == "size" else 2, plan="sequential")
    data = sequences(40)
    if mistake == "data":
        data = [{"input_ids": row["input_ids"]} for row in data]
    trainer = HelixTrainer(
        model=llama(), args=args, train_dataset=data, helix_config=config, callbacks=[Broken(mistake)]
    )
    loss = trainer.train().training_loss
    if mistake == "sound" and trainer.is_world_process_zero():
        print(f"trained: {loss:.3f}", flush=True)
    if mistake == "alone" and trainer.is_world_process_zero():
        trainer.save_model()
    if mistake == "preempt":
        print(f"rank {rank()} went on after step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
