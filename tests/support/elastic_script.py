"""A training script whose ranks come and go: it only calls `train()`, with the layouts in the file of its options.

In:   the options in HELIX_CONFIG_FILE, and the flags.
      Steps take a while as long as the file `slowly` is there.
Out:  checkpoints in `out`; in their histories the losses and samples of every step; a line on the screen for each step.
Must hold: the history of a checkpoint has what led to it, and nothing of steps that were lost.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.models import arguments, llama, sequences
from transformers import TrainerCallback

from hf_helix import HelixTrainer

OUT, ROWS, SLOWLY, TRAINING = (
    "out",
    2,
    "slowly",
    {"learning_rate": 1e-2, "lr_scheduler_type": "cosine", "num_train_epochs": 1},
)
STEP_OF_MOST = 4  # micro-batches of a step on all data-parallel ranks


class NotingTrainer(HelixTrainer):
    """Notes which samples a step takes, by their places in the data."""

    fetched: list[int]

    def get_batch_samples(self, *given: Any) -> Any:
        batches, count = super().get_batch_samples(*given)
        places = {tuple(row["input_ids"].tolist()): place for place, row in enumerate(self.train_dataset)}
        self.fetched = [places[tuple(row)] for batch in batches for row in batch["input_ids"].tolist()]
        return batches, count


class Note(TrainerCallback):
    """Puts the samples of a step into the history of the run, those of a shared batch once."""

    def __init__(self, trainer: NotingTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        everyone: list[Any] = [self.trainer.fetched]
        if args.world_size > 1:
            everyone = [None] * args.world_size
            dist.all_gather_object(everyone, self.trainer.fetched)
        samples = sorted(place for mine in everyone[:: self.trainer.helix_config.ranks_per_batch] for place in mine)
        state.log_history.append({"step": state.global_step, "samples": samples, "world": args.world_size})
        if args.process_index == 0:
            print(f"step {state.global_step} on {args.world_size} ranks", flush=True)
        time.sleep(0.25 if Path(SLOWLY).exists() else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12, help="of an epoch")
    parser.add_argument("--die-after", type=int, default=0, help="the step after which the last rank is killed")
    parser.add_argument("--training", type=json.loads, default={}, help="further training arguments")
    flags = parser.parse_args()
    training = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "logging_steps": 1, **TRAINING}
    training |= {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2, "max_steps": -1}
    args = arguments(OUT, **training | flags.training)
    rows = sequences(flags.steps * ROWS * STEP_OF_MOST)
    trainer = NotingTrainer(model=llama(num_hidden_layers=4), args=args, train_dataset=rows)
    trainer.add_callback(Note(trainer))
    if flags.die_after and args.process_index == args.world_size - 1:
        trainer.add_callback(Die(flags.die_after))
    trainer.train()


class Die(TrainerCallback):
    """Ends this rank as a lost node does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), 9)


if __name__ == "__main__":
    main()
