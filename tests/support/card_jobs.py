"""Model cards, for a `Cluster`. Named "support.card_jobs:function" there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from support.jobs import make_trainer
from support.tuning_jobs import hasty


def write_card(folder: str, helix: dict[str, Any], measure: bool = False, **card: Any) -> bool:
    """Train two steps and write a card, every rank into a folder of its own; whether this one has written."""
    own = Path(folder, os.environ["RANK"])
    model = {"num_hidden_layers": 5}  # enough for two ranks of a fold
    trainer = make_trainer(str(own), helix, model=model, training={"max_steps": 2, "gradient_accumulation_steps": 3})
    with hasty():
        trainer.train()
    if measure:
        trainer.measure_overlap(repeats=1)
    trainer.create_model_card(**card)
    return (own / "README.md").exists()
