"""Pretrain a causal language model from random weights, or one that you have further, over several ranks,
communication behind computation.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/pretrain.py
    accelerate launch --config_file accelerate_configs/gpu_tp2.yaml recipes/pretrain.py --text corpus.jsonl
    accelerate launch --config_file accelerate_configs/gpu_tp2.yaml recipes/pretrain.py --config_name Qwen/Qwen3-8B
    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/pretrain.py --model_name_or_path runs/demo
    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/pretrain.py --link 300mbit

In:   the configuration of a model (`recipes/models` has some), or a model with its tokenizer; a text, and the layout in
      the launcher's YAML.
Out:  an ordinary Hugging Face checkpoint with its tokenizer and model card; a scorecard of the overlap, and
      with `--link` what it gains on an emulated link.
Must hold: nothing is downloaded unless it is named. The text is Python's own documentation and the tokenizer is trained
on it, unless `--text`, `--tokenizer_name` or a model say otherwise. No rank holds a whole model before the end: random
weights are drawn, and weights of a checkpoint read, slice by slice. At the end a model trained from random weights is
loaded back.

Every field of TrainingArguments is a flag, too. With `--save_strategy steps` a run that is started again goes on from
its last checkpoint.
"""

import json
import pydoc_data.topics
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_helix import HelixTrainer
from hf_helix.checkpoint.load import build_on_meta
from hf_helix.integrations.accelerate.launcher import resolve_config
from hf_helix.report.comparison import format_comparison, save_comparison, text_of
from hf_helix.tuning.candidates import Comparison
from hf_helix.tuning.result_text import format_scorecard

MODELS = Path(__file__).parent / "models"


@dataclass
class RecipeArguments:
    """What to train, and on what."""

    model_name_or_path: str = field(
        default="", metadata={"help": "a model to train further, with its tokenizer: a folder, or a name on the Hub"}
    )
    config_name: str = field(
        default=str(MODELS / "llama-5m"),
        metadata={"help": "a model's configuration: a folder, a file or a name; default: recipes/models/llama-5m"},
    )
    config_overrides: str = field(
        default="", metadata={"help": "values of it to change, such as num_hidden_layers=2,hidden_size=128"}
    )
    tokenizer_name: str = field(
        default="", metadata={"help": "a tokenizer's folder or name; default: one is trained on the text"}
    )
    text: str = field(
        default="",
        metadata={
            "help": "a text file, a JSONL file, a saved dataset's folder or a dataset's name; default: Python's docs"
        },
    )
    text_column: str = field(default="text", metadata={"help": "where the text is in a JSONL file or dataset"})
    prompt: str = field(default="The class", metadata={"help": "what the trained model goes on from"})
    trace: str = field(default="", metadata={"help": "write a trace of a window there, for https://ui.perfetto.dev"})
    sequence_length: int = field(default=256, metadata={"help": "documents are packed and cut to this"})
    link: str = field(
        default="",
        metadata={
            "help": "emulate a link between the ranks, on CPU: 300mbit, 10gbit,50us or even (communication takes as "
            "long as computation); and show at the end what overlap gains on it"
        },
    )


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

    helix = resolve_config(None, getattr(args.parallelism_config, "given", None))
    if recipe.link:
        helix = replace(helix, link=recipe.link, tuning_share=1.0)  # the gain is what it is about

    folder = checkpoint_of(recipe, args)
    config = read_config(folder or recipe.config_name, recipe.config_overrides)
    documents = read_documents(recipe.text, recipe.text_column)
    if recipe.tokenizer_name or folder:
        tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer_name or folder)
    else:
        with args.main_process_first(local=False):  # one writes for all machines
            tokenizer = make_tokenizer(documents, config.vocab_size, Path(args.output_dir, "tokenizer"))
    check_sizes(config, len(tokenizer), recipe.sequence_length)
    training, held_out = split(pack(documents, tokenizer, recipe.sequence_length))

    trainer = HelixTrainer(
        model=build_on_meta(folder, torch.float32) if folder else make_model(config, tokenizer),
        weights=folder or None,
        args=args,
        train_dataset=training,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        helix_config=helix,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or has_checkpoint(args))
    metrics = trainer.evaluate()
    overlap = None if helix.link else trainer.measure_overlap()
    compared = trainer.compare_plans(repeats=2) if helix.link else None
    if recipe.trace:
        trainer.trace(recipe.trace)
    trainer.save_model()
    name = recipe.model_name_or_path
    trainer.create_model_card(
        **card_of(recipe.text), finetuned_from=(Path(name).name if Path(name).is_dir() else name) or None
    )
    if trainer.is_world_process_zero():
        print(f"\nloss on held-out text: {metrics['eval_loss']:.3f}")
        print(f"checkpoint: {args.output_dir}")
        if not folder:
            loaded = AutoModelForCausalLM.from_pretrained(args.output_dir)  # as anybody would load it
            print(f"loaded back, it writes: {generate(loaded, args.output_dir, recipe.prompt)!r}\n")
        if overlap is not None:
            print(format_scorecard(overlap, trainer.plan.rule))
        if compared is not None:
            show_gain(compared, args.output_dir)
        page = Path(args.output_dir, "helix", "page.html")
        if page.is_file():
            print(f"a page of the run, for a browser: {page}")


def show_gain(compared: Comparison, folder: str) -> None:
    """What overlap gains on the emulated link; the picture."""
    print(format_comparison(compared), end="\n\n")
    print(text_of(compared), end="\n\n")
    try:
        print(f"plan, profile and picture: {', '.join(map(str, save_comparison(compared, folder)))}")
    except ImportError as error:
        print(f"plan and profile: {folder}; no picture: {error}")


def has_checkpoint(args: TrainingArguments) -> bool:
    """Whether an earlier start of this run has left something to go on from, as after a restart by torchrun."""
    return not args.save_only_model and Path(args.output_dir).is_dir() and bool(get_last_checkpoint(args.output_dir))


def checkpoint_of(recipe: RecipeArguments, args: TrainingArguments) -> str:
    """The folder of the model to train further, downloaded once for each machine if need be; empty for none."""
    name = recipe.model_name_or_path
    if name and recipe.config_overrides:
        raise ValueError(
            f"--model_name_or_path {name} has its own configuration; leave --config_overrides out, or give "
            "--config_name in its place and train from random weights"
        )
    if not name or Path(name).is_dir():
        return name
    with args.main_process_first():
        return snapshot_download(name)


def reachable(name: str) -> str:
    """A folder or a name on the Hub; without the Hub, the folder of `recipes/models` that has the model's shape."""
    folder = MODELS / name.rpartition("/")[2].lower()
    if Path(name).exists() or not folder.is_dir():
        return name
    try:
        AutoConfig.from_pretrained(name)
    except OSError:
        print(f"the Hub gives no configuration of {name}; its shape is read from {folder}")
        return str(folder)
    return name


def read_config(name: str, overrides: str) -> PreTrainedConfig:
    """A model's configuration, with some values changed as if they stood in its file."""
    name = reachable(name)
    config = AutoConfig.from_pretrained(name)
    changes = dict(pair.partition("=")[::2] for pair in overrides.split(",") if pair)
    unknown = [key for key in changes if not hasattr(config, key)]
    if unknown:
        raise ValueError(
            f"--config_overrides {overrides}: a configuration of {config.model_type} has no {', '.join(unknown)}; give "
            "what it has, such as --config_overrides num_hidden_layers=2"
        )
    values = {config.attribute_map.get(key, key): parse(value) for key, value in changes.items()}
    in_file, _ = type(config).get_config_dict(name)
    return type(config).from_dict({**in_file, **values})


def parse(value: str) -> Any:
    """A number, true, false or null; anything else is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def check_sizes(config: PreTrainedConfig, num_tokens: int, sequence_length: int) -> None:
    if num_tokens > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens, more than the model's vocabulary of {config.vocab_size}; use "
            f"--config_overrides vocab_size={num_tokens}, or another --tokenizer_name"
        )
    if sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"--sequence_length {sequence_length} is longer than the model's {config.max_position_embeddings} "
            f"positions; use --config_overrides max_position_embeddings={sequence_length}, or shorter sequences"
        )


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


def card_of(source: str) -> dict[str, Any]:
    """What a model card says of the text: a name, and a tag if it is on the Hub."""
    if source and not Path(source).exists():
        return {"dataset": source, "dataset_tags": source}
    return {"dataset": Path(source).name or "Python documentation", "dataset_tags": []}


def make_tokenizer(documents: list[str], vocab_size: int, folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained by the first process and read by the others."""
    from tokenizers import ByteLevelBPETokenizer

    end = "<|endoftext|>"
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(documents, vocab_size=vocab_size, special_tokens=[end], show_progress=False)
        PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=end, eos_token=end).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def pack(documents: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
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


def make_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """An ordinary Transformers model without weights: every rank draws those that it holds, and none has them all."""
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.name_or_path = ""  # the model is no version of the one whose shape it has
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def generate(model: PreTrainedModel, folder: str, prompt: str) -> str:
    """What a model writes with the tokenizer of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    set_seed(0)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=True, temperature=0.7, top_k=40)
    return tokenizer.decode(output[0], skip_special_tokens=True)


if __name__ == "__main__":
    main()
