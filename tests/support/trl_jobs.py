"""TRL's trainers, with and without the mixin, on a tiny tokenizer's texts."""

import random
from pathlib import Path
from typing import Any

import torch
from support.sft_jobs import VOCABULARY, mixed, pairs
from transformers import TrainerCallback

LEFT_OUT = ("eval_runtime", "eval_s", "train_", "helix", "epoch", "step_time")
LARGE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 7, "num_attention_heads": 8}
ONLINE, PREFERENCES, TEACHERS = ("grpo", "rloo"), ("dpo", "kto", "synced"), ("gkd", "distillation")


def rows(kind: str, count: int) -> Any:
    from datasets import Dataset

    made: list[dict[str, Any]] = []
    given = pairs(count)
    for number, (row, other) in enumerate(zip(given, given[1:] + given[:1], strict=True)):
        prompt, completion = row["prompt"], row["completion"]
        if kind == "gkd":
            said = {"user": prompt, "assistant": completion}
            made.append({"messages": [{"role": role, "content": text} for role, text in said.items()]})
            continue
        made.append({"prompt": prompt})
        if kind == "kto":
            made[-1] |= {"completion": completion, "label": number % 2 == 0}
        elif kind in ("dpo", "synced", "reward"):
            made[-1] |= {"chosen": completion, "rejected": other["completion"]}
        if kind == "reward":
            made[-1]["margin"] = float(number % 3)
    return Dataset.from_list(made)


def on_disk(kind: str, folder: str) -> Any:
    """Rows in a file, so that processes share what TRL keeps beside it."""
    from datasets import load_from_disk

    path, waits = Path(folder) / "rows", torch.distributed.is_initialized()
    if not waits or torch.distributed.get_rank() == 0:
        rows(kind, 36).save_to_disk(str(path))
    if waits:
        torch.distributed.barrier()
    return load_from_disk(str(path))


def model(family: str, seed: int, kind: str = "", **sizes: Any) -> Any:
    import transformers

    torch.manual_seed(seed)
    usual = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    if family not in ("Llama", "Qwen2", "Bert"):
        usual |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    labels = 1 if kind == "reward" else 2
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, num_labels=labels, **{**usual, **sizes}
    )
    head = "SequenceClassification" if kind == "reward" else "CausalLM"
    return getattr(transformers, f"{family}For{head}")(config)


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each)) % 7) / 7 for each in completions]


def of_twice_the_loss(stock: Any, method: str) -> Any:
    """A class of a user's own, whose method returns twice the loss."""

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * getattr(super(Doubled, self), method)(*args, **kwargs)

    Doubled = type("Doubled", (stock,), {method: doubled})
    return Doubled


def make(
    folder: str, tokenizer: str, helix: dict[str, Any] | None, kind: str, shares: bool, given: dict[str, Any]
) -> Any:
    """A trainer for a short run.

    Args:
        shares: whether data-parallel ranks share the rows of a batch out.
        given: training arguments, and `family`, `sizes` and `model_seed`, `lora`, or `saved`, a folder of the model;
            `teacher`, another family for a larger one, `judge`, the family of a reward model; `doubles`, a method that
            returns twice the loss in a class of a user's own.
    """
    import trl
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    name = {"reward": "Reward", "synced": "DPO", "distillation": "Distillation"}.get(kind, kind.upper())
    stock = GKDTrainer if kind == "gkd" else getattr(trl, f"{name}Trainer")
    stock = of_twice_the_loss(stock, given["doubles"]) if "doubles" in given else stock
    config: Any = GKDConfig if kind == "gkd" else getattr(trl, f"{name}Config")
    given = {name: value for name, value in given.items() if name != "doubles"}
    family, lora, seed = given.pop("family", "Llama"), given.pop("lora", False), given.pop("model_seed", 0)
    sizes, teacher, judge = given.pop("sizes", {}), given.pop("teacher", family), given.pop("judge", None)
    options: dict[str, Any] = {"model": given.pop("saved", None) or model(family, seed, kind, **sizes)}
    size = 2 if shares and torch.distributed.is_initialized() else 4
    usual = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size, "gradient_accumulation_steps": 3}
    usual |= {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3, "report_to": [], "use_cpu": True}
    usual |= {"save_strategy": "no", "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False}
    usual["output_dir"] = folder
    if kind in ONLINE:
        usual |= {"num_generations": 4, "max_completion_length": 8, "steps_per_generation": 2}
        usual |= {"beta": 0.04 if lora else 0.0, "max_steps": 4}
        options["reward_funcs"] = model(judge, 5, "reward") if judge else variety
        if judge:
            options["reward_processing_classes"] = AutoTokenizer.from_pretrained(tokenizer)
    elif kind in TEACHERS:
        options["teacher_model"] = model(teacher, 7, **(LARGE if teacher != family else {}))
    elif "precompute_ref_log_probs" not in given:
        usual |= {"eval_strategy": "steps", "eval_steps": 3}
        options["eval_dataset"] = rows(kind, 8)
    if kind == "synced":
        usual |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    if kind in PREFERENCES and not lora:  # of equal models, the sign of a difference is that of its rounding
        options["ref_model"] = model(family, 7)
    if lora:
        targets = ["q_proj", "v_proj", "down_proj"] if family == "Llama" else "all-linear"
        options["peft_config"] = LoraConfig(**{"r": 4, "target_modules": targets, **(lora if lora is not True else {})})
    options |= {"args": config(**{**usual, **given}), "train_dataset": on_disk(kind, folder)}
    options["processing_class"] = AutoTokenizer.from_pretrained(tokenizer)
    random.seed(0)
    torch.manual_seed(0)
    return mixed(stock, helix, **options)


class FirstGradients(TrainerCallback):
    """The whole gradients of a trainer's first step, by the names of what is trained."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.found: dict[str, Any] = {}

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if not self.found:
            trained = {name: each for name, each in self.trainer.model.named_parameters() if each.requires_grad}
            self.found = {name: self._whole(name, each).float().numpy().copy() for name, each in trained.items()}

    def _whole(self, name: str, parameter: Any) -> torch.Tensor:
        if not hasattr(self.trainer, "helix"):
            return parameter.grad
        with self.trainer.helix.full_gradient(name) as gradient:
            return gradient.detach()


def log_of(trainer: Any) -> list[dict[str, Any]]:
    """Every logged figure but times."""
    log = trainer.state.log_history
    return [{key: value for key, value in entry.items() if not key.startswith(LEFT_OUT)} for entry in log]
