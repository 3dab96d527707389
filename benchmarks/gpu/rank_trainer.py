"""A training script as a user would write it, on synthetic tokens: `torchrun ... -m benchmarks.gpu.rank_trainer`.

In:   a folder; the ranks of the launcher, if there is one.
Out:  the logged losses in `losses.json` of the folder, and the model beside it.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu.layouts import hurry
from benchmarks.gpu.models import batches, tiny
from hf_helix import HelixConfig, HelixTrainer


def pose_as_hosts() -> None:
    """Where ranks of a launcher must share a GPU: see `benchmarks.gpu.pair`. Before torch starts anything."""
    if torch.cuda.device_count() < 2 and "RANK" in os.environ:
        os.environ.setdefault("NCCL_HOSTID", f"helix-{os.environ['RANK']}")
        os.environ["LOCAL_RANK"] = "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stock", action="store_true", help="the Trainer of Transformers, in one process")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--plan", default="auto")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--mark", type=Path, help="made after the second step")
    given = parser.parse_args()
    if not given.dry:
        pose_as_hosts()

    class Mark(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if given.mark is not None and state.global_step == 2 and state.is_world_process_zero:
                given.mark.touch()

    rows = [{name: value[0] for name, value in batch.items()} for batch in batches(64, rows=1, lengths=(32,))]
    arguments = TrainingArguments(
        output_dir=str(given.folder),
        max_steps=given.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
        use_cpu=given.dry,
    )
    common: dict[str, Any] = {"model": tiny("llama"), "args": arguments, "train_dataset": rows}
    common |= {"eval_dataset": rows[:6], "callbacks": [Mark()]}
    helix = HelixConfig(tp_size=2, plan=given.plan, tuning_share=1.0, cache=False)
    trainer = Trainer(**common) if given.stock else HelixTrainer(**common, helix_config=helix)
    hurry()
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(given.folder))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    about = "" if given.stock or trainer.tuning is None else f"plan kept: {trainer.tuning.chosen}"
    if trainer.is_world_process_zero():
        figures = {"losses": losses, "eval": evaluated, "about": about}
        (given.folder / "losses.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
