"""TRL's SFTTrainer, with and without the mixin, on prompts with completions of a tiny tokenizer."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from support.models import FAMILIES, QUIET
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_helix import HelixConfig, HelixTrainerMixin

VOCABULARY = 283  # bytes, some merges, the end; divides by nothing
END = "<|endoftext|>"
FIGURES = ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)


def mixed(stock: Any, helix: dict[str, Any] | None, **options: Any) -> Any:
    """A trainer of a class of TRL's; with the mixin, unless `helix` is None."""
    if helix is None:
        return stock(**options)
    kind = type("Mixed", (HelixTrainerMixin, stock), {})
    return kind(**options, helix_config=HelixConfig(**{"plan": "greedy", "cache": False, **helix}))


def save_tokenizer(folder: Path) -> None:
    bpe = ByteLevelBPETokenizer()
    texts = [text for row in pairs(60) for text in row.values()]
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=END)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


def pairs(count: int) -> list[dict[str, str]]:
    """Prompts and completions of many lengths."""
    return [
        {
            "prompt": f"What is {n} and {3 * n}?" + " Say it." * (n % 3),
            "completion": " " + f"It is {4 * n}. " * (1 + n % 4),
        }
        for n in range(count)
    ]


def rows(kind: str, count: int) -> Dataset:
    """Of texts, prompts and completions, or conversations."""
    result: list[dict[str, Any]] = list(pairs(count))
    if kind == "text":
        result = [{"text": row["prompt"] + row["completion"]} for row in result]
    if kind == "conversations":
        result = [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"]},
                ]
            }
            for row in result
        ]
    return Dataset.from_list(result)


def make(
    folder: str, tokenizer: str, helix: dict[str, Any] | None, training: dict[str, Any], kind: str, **options: Any
) -> SFTTrainer:
    """The stock trainer where `helix` is None."""
    usual: dict[str, Any] = {
        "output_dir": folder,
        **QUIET,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "max_length": 48,
    }
    if training.get("is_plain"):
        usual, training = {key: value for key, value in usual.items() if key != "max_length"}, {}
        options["args"] = TrainingArguments(**usual)
    sizes = {"num_hidden_layers": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    common: dict[str, Any] = {
        "model": FAMILIES[options.pop("family", "llama")](**sizes),
        "args": SFTConfig(**{**usual, **training}),
        "train_dataset": rows(kind, 30),
        "eval_dataset": rows(kind, 5),
        "processing_class": AutoTokenizer.from_pretrained(tokenizer),
        **options,
    }
    return mixed(SFTTrainer, helix, **common)


def train(folder: str, tokenizer: str, helix: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Train, evaluate, save with a model card."""
    trainer = make(folder, tokenizer, helix, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()
    result = {
        "figures": {
            **{name: [entry[name] for entry in logs] for name in FIGURES if name in logs[0]},
            **{f"eval_{name}": [evaluated[f"eval_{name}"]] for name in FIGURES if name in logs[0]},
        },
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "best": trainer.state.best_metric,
        "eval": evaluated["eval_loss"],
        "logged": sorted(set().union(*logs)),
        "documents": int((batch["position_ids"] == 0).sum()) if "position_ids" in batch else 0,
        "rows": len(batch["input_ids"]),
        "own": helix is not None and trainer.helix.ends_at_decoder,
        "trained": float((batch["labels"] != -100).float().mean()),
    }
    trainer.save_model(folder)
    trainer.create_model_card(model_name="sums")
    if helix is not None:
        trainer.helix.close()
    return result
