"""What cells of a notebook would do. Started by test_endings.py."""

from __future__ import annotations

import sys
from typing import Any

from accelerate import notebook_launcher
from support.models import arguments, llama, sequences

from hf_helix import HelixConfig, HelixTrainer


def train(tp_size: int) -> Any:
    trainer = HelixTrainer(
        model=llama(),
        args=arguments("out", max_steps=2, gradient_accumulation_steps=2),
        train_dataset=sequences(8),
        helix_config=HelixConfig(tp_size=tp_size, plan="sequential"),
    )
    return trainer.train().training_loss


if __name__ == "__main__":
    sizes = [int(size) for size in sys.argv[2:]]
    for tp_size in sizes:
        try:
            found = notebook_launcher(train, args=(tp_size,), num_processes=2, use_port=sys.argv[1])
            print(f"the cell with tp_size={tp_size} returned {found}")
        except Exception as error:
            print(f"the cell with tp_size={tp_size} raised {type(error).__name__}: {error}")
