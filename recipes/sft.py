"""Fine-tune on chats, or on prompts and completions, with TRL's SFTTrainer, over several ranks, communication behind
computation.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/sft.py
    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/sft.py --chat
    accelerate launch --config_file LAYOUT recipes/sft.py --model_name_or_path FOLDER --train_file chats.jsonl \\
        --validation_file held_out.jsonl --assistant_only_loss

In:   a model with its tokenizer, JSONL files of lines {"messages": [{"role": "user", "content": ...}, ...]} or
      {"prompt": ..., "completion": ...}, and the layout in the launcher's YAML. Without them, a tiny model with random
      weights and Python's documentation of its topics, with `--chat` as chats in files that are written.
Out:  an ordinary Hugging Face checkpoint with its tokenizer and model card.

Every field of TRL's SFTConfig is a flag, too.
"""

import json
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
    train_file: str = field(default="", metadata={"help": "a JSONL file; default: Python's docs"})
    validation_file: str = field(default="", metadata={"help": "a JSONL file; default: a tenth of the other one"})
    chat: bool = field(default=False, metadata={"help": "write Python's docs as chats to two files, and train on them"})


CHATS = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The chat template of the tiny model, in which the words of the assistant can be told apart."""

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
    if recipe.chat and not recipe.train_file:
        recipe.train_file, recipe.validation_file = write_chats(args)
    rows, held_out = read_rows(recipe.train_file), None
    if recipe.validation_file:
        held_out = read_rows(recipe.validation_file)
    else:
        rows, held_out = rows.train_test_split(test_size=0.1, seed=0).values()
    model, tokenizer = make(recipe.model_name_or_path, rows, args)

    trainer = HelixSFTTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card(dataset_name=Path(recipe.train_file).name or "Python documentation")
    if trainer.is_world_process_zero():
        print(f"\nloss on held-out completions: {metrics['eval_loss']:.3f}")
        print(f"plan {trainer.plan.rule}; checkpoint: {args.output_dir}")


def read_rows(path: str) -> Dataset:
    """Chats, or prompts and completions."""
    if not path:
        return read_pairs()
    rows = load_dataset("json", data_files=path, split="train")
    known = ["messages"] if "messages" in rows.column_names else ["prompt", "completion"]
    if missing := {*known} - {*rows.column_names}:
        raise ValueError(
            f"{path} has lines with {', '.join(rows.column_names)}, and {', '.join(sorted(missing))} is missing: give "
            'lines {"messages": [...]}, or {"prompt": ..., "completion": ...}'
        )
    return rows.select_columns(known)


def read_pairs() -> Dataset:
    """Python's documentation as prompts and completions."""
    topics = {name: " ".join(text.split())[:400] for name, text in sorted(pydoc_data.topics.topics.items())}
    return Dataset.from_list(
        [{"prompt": f"What is {name} in Python?\n", "completion": text} for name, text in topics.items()]
    )


def write_chats(args: SFTConfig) -> tuple[str, str]:
    """The files of chats to train on and to validate with, which are written."""
    folder = Path(args.output_dir, "chats")
    paths = folder / "train.jsonl", folder / "validation.jsonl"
    with args.main_process_first(local=False):
        if args.process_index == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for path, rows in zip(paths, read_pairs().train_test_split(test_size=0.1, seed=0).values(), strict=True):
                path.write_text("".join(f"{json.dumps({'messages': chat_of(row)})}\n" for row in rows))
    return str(paths[0]), str(paths[1])


def chat_of(row: dict[str, str]) -> list[dict[str, str]]:
    """The messages of a prompt and a completion."""
    return [{"role": "user", "content": row["prompt"].strip()}, {"role": "assistant", "content": row["completion"]}]


def make(name: str, rows: Dataset, args: SFTConfig) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    if name:
        dtype = torch.float32  # weights; products are in bf16 with `--bf16`
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
    config = read_config(str(MODELS / "tiny-llama"), "")
    texts = [text for row in rows for text in texts_of(row)]
    with args.main_process_first(local=False):  # one writes for all machines
        tokenizer = make_tokenizer(texts, config.vocab_size, Path(args.output_dir, "tokenizer"))
    tokenizer.chat_template = CHATS
    return make_model(config, tokenizer), tokenizer


def texts_of(row: dict[str, Any]) -> list[str]:
    """The texts of a chat, or of a pair."""
    return [each["content"] for each in row["messages"]] if "messages" in row else [row["prompt"], row["completion"]]


if __name__ == "__main__":
    main()
