"""Train a small Llama from scratch, over a tensor-parallel group or a pipeline, communication behind computation.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/pretrain.py
    accelerate launch --config_file accelerate_configs/gpu_tp2.yaml recipes/pretrain.py --text corpus.jsonl
    accelerate launch --config_file accelerate_configs/cpu_pp2.yaml recipes/pretrain.py

The text is Python's own documentation unless `--text` names something else; a byte-level BPE tokenizer is trained on
it on the spot. Every field of TrainingArguments is a flag, too.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset, load_from_disk
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_helix import HelixTrainer
from hf_helix.report.scorecard import format_scorecard


@dataclass
class RecipeArguments:
    """What to train, and on what."""

    text: str = field(
        default="",
        metadata={
            "help": "a text file, a JSONL file, a saved dataset's folder or a dataset's name; default: Python's docs"
        },
    )
    text_column: str = field(default="text", metadata={"help": "where the text is in a JSONL file or dataset"})
    prompt: str = field(default="The class", metadata={"help": "what the trained model goes on from"})
    trace: str = field(default="", metadata={"help": "write a trace of a window there, for https://ui.perfetto.dev"})
    vocab_size: int = 4096
    sequence_length: int = 256
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4


DEFAULTS = {
    "output_dir": "runs/pretrain",
    "use_cpu": not torch.cuda.is_available(),
    "max_steps": 150,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "weight_decay": 0.1,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
}


def main() -> None:
    parser = HfArgumentParser((RecipeArguments, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    recipe, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    documents = read_documents(recipe.text, recipe.text_column)
    with args.main_process_first():
        tokenizer = make_tokenizer(documents, recipe.vocab_size, Path(args.output_dir, "tokenizer"))
    training, held_out = split(pack(documents, tokenizer, recipe.sequence_length))

    trainer = HelixTrainer(
        model=make_model(recipe, tokenizer),
        args=args,
        train_dataset=training,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    metrics = trainer.evaluate()
    overlap = trainer.measure_overlap()
    if recipe.trace:
        trainer.trace(recipe.trace)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"\nloss on held-out text: {metrics['eval_loss']:.3f}")
        print(format_scorecard(overlap, trainer.plan.rule))
        print(f"checkpoint: {args.output_dir}")
        print(f"loaded back, it writes: {generate(args.output_dir, recipe.prompt)!r}")


def read_documents(source: str, column: str) -> list[str]:
    """The texts of a file, a dataset, or Python's documentation."""
    path = Path(source)
    if not source:
        return [" ".join(text.split()) for text in pydoc_data.topics.topics.values()]
    if path.suffix in (".jsonl", ".json"):
        return list(load_dataset("json", data_files=source, split="train")[column])
    if path.is_file():
        return path.read_text(errors="replace").split("\n\n")
    if path.is_dir():
        return list(load_from_disk(source)[column])
    return list(load_dataset(source, split="train")[column])


def make_tokenizer(documents: list[str], vocab_size: int, folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained by the first process and read by the others."""
    from tokenizers import ByteLevelBPETokenizer

    end = "<|endoftext|>"
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(documents, vocab_size=vocab_size, special_tokens=[end], show_progress=False)
        PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=end, eos_token=end).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def pack(documents: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> list[list[int]]:
    """Documents one after the other, cut into sequences of equal length."""
    ids = [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]


def split(sequences: list[list[int]]) -> tuple[Dataset, Dataset]:
    """Training and held-out sequences, the same on every process."""
    random.Random(0).shuffle(sequences)
    held_out = max(1, len(sequences) // 20)
    return to_dataset(sequences[held_out:]), to_dataset(sequences[:held_out])


def to_dataset(sequences: list[list[int]]) -> Dataset:
    return Dataset.from_dict({"input_ids": sequences, "labels": sequences})


def make_model(recipe: RecipeArguments, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An ordinary Transformers model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        max_position_embeddings=max(512, recipe.sequence_length),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def generate(folder: str, prompt: str) -> str:
    """What the saved model writes, loaded as anybody would load it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    set_seed(0)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=True, temperature=0.7, top_k=40)
    return tokenizer.decode(output[0], skip_special_tokens=True)


if __name__ == "__main__":
    main()
