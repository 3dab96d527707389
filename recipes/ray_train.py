"""HelixTrainer in the workers of Ray Train, in a layout for each number of workers.

    pip install -e '.[recipes,ray]'
    python recipes/ray_train.py --num_workers 2 --storage_path /a/folder/of/all/nodes

In:   the configuration of a model, Python's documentation as bytes, the workers; a folder that all nodes see.
Out:  ordinary Hugging Face checkpoints in `STORAGE_PATH/NAME/trainer`, and Ray's copies of them with their metrics.
Must hold: a run goes on when workers are lost or come: Ray starts the training function again, which takes the layout
for their number, and `train()` goes on from the newest whole checkpoint.
"""

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

LENGTH = 128
LAYOUTS = {4: {"tp_size": 2}, 3: {"shard_optimizer": True}, 2: {"tp_size": 2}}


def parts(options: dict[str, Any]) -> dict[str, Any]:
    """The model, the training arguments and the data, as for any Trainer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

    args = TrainingArguments(
        output_dir=options["output_dir"],
        use_cpu=not options["use_gpu"],
        max_steps=options["steps"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,  # of four workers in two pairs: 12 sequences, which three workers can share
        learning_rate=3e-3,
        save_steps=options["save_steps"],
        save_total_limit=2,
        logging_steps=options["save_steps"],
        report_to="none",
    )
    text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
    rows = [list(text[start : start + LENGTH]) for start in range(0, len(text) - LENGTH, LENGTH)]
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options["model"]), dtype=torch.float32)
    return {"model": model, "args": args, "train_dataset": [{"input_ids": row, "labels": row} for row in rows]}


def train(options: dict[str, Any]) -> None:
    """Trains as a script under a launcher would; runs in every worker."""
    from ray.train.huggingface.transformers import RayTrainReportCallback

    from hf_helix import HelixConfig, HelixTrainer

    trainer = HelixTrainer(**parts(options), helix_config=HelixConfig(layouts=LAYOUTS))
    trainer.add_callback(RayTrainReportCallback())
    trainer.train()


def run(flags: argparse.Namespace) -> Result:
    """Trains with the workers that are there, and returns Ray's result."""
    workers = flags.num_workers[0] if len(flags.num_workers) == 1 else tuple(flags.num_workers)
    storage = Path(flags.storage_path).absolute()
    options = {**vars(flags), "output_dir": str(storage / flags.name / "trainer")}
    return TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=flags.use_gpu),
        run_config=RunConfig(
            name=flags.name, storage_path=str(storage), failure_config=FailureConfig(max_failures=flags.max_failures)
        ),
    ).fit()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num_workers", type=int, nargs="+", default=[2], help="one number, or the least and the most")
    parser.add_argument("--storage_path", default="runs/ray", help="a folder that all nodes see")
    parser.add_argument("--name", default="helix", help="of the run: started again, it goes on")
    parser.add_argument("--model", default=str(Path(__file__).resolve().parent / "models" / "tiny-llama"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save_steps", type=int, default=20)
    parser.add_argument("--max_failures", type=int, default=100, help="how often Ray starts the workers again")
    parser.add_argument("--use_gpu", action="store_true")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = run(parse())
    print(f"loss {result.metrics['loss']}, Ray's checkpoint: {result.checkpoint.path}/checkpoint")
