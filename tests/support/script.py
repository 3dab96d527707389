"""A training script as a user would write it, with switches to break it. Started by test_launch.py."""

from __future__ import annotations

import argparse
import os
import signal
import time

from support.models import arguments, llama, sequences
from transformers import TrainerCallback

from hf_helix import HelixTrainer


class Fail(TrainerCallback):
    """Breaks one rank inside the backward of the third step, by way of its data or by a signal."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.trainer: HelixTrainer | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            executor = self.trainer.helix.runner.executor
            original, calls = executor._compute, iter(range(1000))

            def broken(*arguments):
                if next(calls) == 30:
                    print(f"failing at {time.time()}", flush=True)
                    if self.how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("the data of this rank is broken")
                return original(*arguments)

            executor._compute = broken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", choices=["", "raise", "kill"], default="")
    parser.add_argument("--victim", type=int, default=0)
    flags = parser.parse_args()
    args = arguments("out", max_steps=6, gradient_accumulation_steps=2)
    trainer = HelixTrainer(model=llama(), args=args, train_dataset=sequences(40))
    if flags.fail and args.process_index == flags.victim:
        callback = Fail(flags.fail)
        callback.trainer = trainer
        trainer.add_callback(callback)
    trainer.train()
    if trainer.is_world_process_zero():
        config = trainer.helix_config
        print(f"done: tp_size={config.tp_size} plan={trainer.plan.rule}")


if __name__ == "__main__":
    main()
