"""Fine-tune on prompts and completions with TRL's SFTTrainer, over several ranks, communication behind computation.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/sft.py
    accelerate launch --config_file LAYOUT recipes/sft.py --model_name_or_path FOLDER --pairs pairs.jsonl --packing

In:   a model with its tokenizer, a JSONL file of lines {"prompt": ..., "completion": ...}, and the layout in the
      launcher's YAML. Without them, a tiny model with random weights and Python's documentation of its topics.
Out:  an ordinary Hugging Face checkpoint with its tokenizer and model card.

Every field of TRL's SFTConfig is a flag, too.
"""

import pydoc_data.topics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from pretrain import MODELS, make_model, make_tokenizer, read_config
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer

from hf_helix import HelixTrainerMixin


class HelixSFTTrainer(HelixTrainerMixin, SFTTrainer):
    """TRL's trainer on a model that is cut over the ranks."""


@dataclass
class RecipeArguments:
    """What to fine-tune, and on what."""

    model_name_or_path: str = field(default="", metadata={"help": "default: a tiny Llama with random weights"})
    pairs: str = field(default="", metadata={"help": "a JSONL file of prompts and completions; default: Python's docs"})


DEFAULTS = {
    "output_dir": "runs/sft",
    "use_cpu": not torch.cuda.is_available(),
    "bf16": torch.cuda.is_available(),
    "gradient_checkpointing": False,
    "max_length": 128,
    "max_steps": 60,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 3e-3,
    "save_strategy": "no",
    "report_to": "none",
}


def main() -> None:
    parser = HfArgumentParser((RecipeArguments, SFTConfig))
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    pairs = read_pairs(recipe.pairs)
    model, tokenizer = make(recipe.model_name_or_path, pairs, args)
    halves = pairs.train_test_split(test_size=0.1, seed=0)

    trainer = HelixSFTTrainer(
        model=model,
        args=args,
        train_dataset=halves["train"],
        eval_dataset=halves["test"],
        processing_class=tokenizer,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card(dataset_name=Path(recipe.pairs).name or "Python documentation")
    if trainer.is_world_process_zero():
        print(f"\nloss on held-out completions: {metrics['eval_loss']:.3f}")
        print(f"plan {trainer.plan.rule}; checkpoint: {args.output_dir}")


def read_pairs(path: str) -> Dataset:
    """Prompts and completions."""
    if path:
        return load_dataset("json", data_files=path, split="train").select_columns(["prompt", "completion"])
    topics = {name: " ".join(text.split())[:400] for name, text in sorted(pydoc_data.topics.topics.items())}
    return Dataset.from_list(
        [{"prompt": f"What is {name} in Python?\n", "completion": text} for name, text in topics.items()]
    )


def make(name: str, pairs: Dataset, args: SFTConfig) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    if name:
        dtype = torch.float32  # weights; products are in bf16 with `--bf16`
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
    config = read_config(str(MODELS / "tiny-llama"), "")
    texts = [*pairs["prompt"], *pairs["completion"]]
    with args.main_process_first(local=False):  # one writes for all machines
        tokenizer = make_tokenizer(texts, config.vocab_size, Path(args.output_dir, "tokenizer"))
    return make_model(config, tokenizer), tokenizer


if __name__ == "__main__":
    main()
