"""What cells of a notebook would do. Started by test_endings.py."""

import sys
from typing import Any

from accelerate import notebook_launcher
from support.models import arguments, llama, sequences
from transformers import TrainerCallback

from hf_helix import HelixConfig, HelixTrainer


def train(cell: str) -> None:
    trainer = HelixTrainer(
        model=llama(),
        args=arguments("out", max_steps=2, gradient_accumulation_steps=2),
        train_dataset=sequences(8),
        helix_config=HelixConfig(tp_size=4 if cell == "size" else 2, plan="sequential"),
        callbacks=[Broken()] if cell == "callback" else [],
    )
    loss = trainer.train().training_loss
    if trainer.is_world_process_zero():
        print(f"trained: {loss:.3f}", flush=True)


class Broken(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1:
            raise RuntimeError("boom on one rank")


if __name__ == "__main__":
    for cell in ("sound", "size", "callback"):
        try:
            notebook_launcher(train, args=(cell,), num_processes=2, use_port=sys.argv[1])
        except Exception as error:
            print(f"the cell {cell} raised {type(error).__name__}: {error}\nend of cell", flush=True)
