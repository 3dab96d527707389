"""TRL's trainers under the mixin with what scripts give them: every logged figure of the stock trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.sft_jobs import VOCABULARY, mixed, pairs, save_tokenizer

LEFT_OUT = ("eval_runtime", "eval_s", "train_", "helix", "epoch", "step_time")


def rows(kind: str, count: int) -> Any:
    from datasets import Dataset

    of = [(row["prompt"], row["completion"]) for row in pairs(count)]
    if kind == "gkd":
        roles = ("user", "assistant")
        return Dataset.from_list(
            [{"messages": [{"role": r, "content": t} for r, t in zip(roles, each, strict=True)]} for each in of]
        )
    made = [{"prompt": prompt} for prompt, _ in of]
    if kind in ("dpo", "reward"):
        others = [completion for _, completion in of[1:] + of[:1]]
        made = [{"prompt": p, "chosen": c, "rejected": o} for (p, c), o in zip(of, others, strict=True)]
    if kind == "reward":
        made = [{**row, "margin": float(number % 3)} for number, row in enumerate(made)]
    return Dataset.from_list(made)


def on_disk(kind: str, folder: str) -> Any:
    """Rows in a file, so that processes share what TRL keeps beside it."""
    from datasets import load_from_disk

    path, waits = Path(folder) / "rows", torch.distributed.is_initialized()
    if not waits or torch.distributed.get_rank() == 0:
        rows(kind, 40).save_to_disk(str(path))
    if waits:
        torch.distributed.barrier()
    return load_from_disk(str(path))


def model(family: str, seed: int, kind: str = "") -> Any:
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, num_labels=1, **sizes
    )
    head = "SequenceClassification" if kind == "reward" else "CausalLM"
    return getattr(transformers, f"{family}For{head}")(config)


def follow(
    folder: str, tokenizer: str, helix: dict[str, Any] | None, kind: str, given: dict[str, Any]
) -> list[dict[str, float]]:
    """The log of a short run. Of `given`, what is no training argument: `family`, `ref_model`, `resumes`, `saved`."""
    import random

    import trl
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    name = {"reward": "Reward", "distillation": "Distillation"}.get(kind, kind.upper())
    stock = GKDTrainer if kind == "gkd" else getattr(trl, f"{name}Trainer")
    config: Any = GKDConfig if kind == "gkd" else getattr(trl, f"{name}Config")
    given = dict(given)
    family, resumes, saved = given.pop("family", "Llama"), given.pop("resumes", False), given.pop("saved", None)
    options: dict[str, Any] = {"model": saved or model(family, 0, kind)}
    if given.pop("ref_model", False):
        options["ref_model"] = model(family, 7)
    if kind in ("gkd", "distillation"):
        options["teacher_model"] = model(family, 7)
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1}
    usual |= {"learning_rate": 1e-3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    usual |= {"bf16": False, "gradient_checkpointing": False, "output_dir": folder}

    def make(**more: Any) -> Any:
        words = AutoTokenizer.from_pretrained(tokenizer)
        whole = {**options, "args": config(**{**usual, **given, **more}), "train_dataset": on_disk(kind, folder)}
        whole["processing_class"] = words
        random.seed(0)
        return mixed(stock, helix, **whole)

    if resumes:
        make(save_strategy="steps", save_steps=2).train()
        options["model"] = model(family, 3)
        trainer = make()
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    else:
        trainer = make()
        trainer.train()
    log = trainer.state.log_history
    return [{key: value for key, value in entry.items() if not key.startswith(LEFT_OUT)} for entry in log]


TP, PP = {"tp_size": 2}, {"pp_size": 2}
ONLINE = {"max_completion_length": 6, "temperature": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given", "helix"),
    [
        ("dpo", {"ref_model": True, "bf16": True}, TP),
        ("dpo", {"ref_model": True, "resumes": True}, TP),
        ("dpo", {"ref_model": True, "resumes": True}, PP),
        ("dpo", {"ref_model": True, "precompute_ref_log_probs": True}, TP),
        ("dpo", {"ref_model": True, "family": "Qwen2"}, TP),
        ("dpo", {"saved": "Llama", "ref_model": True}, TP),
        ("reward", {}, TP),
        ("gkd", {"lmbda": 0.0}, TP),
        ("gkd", {"lmbda": 0.0}, PP),
        ("distillation", {**ONLINE, "top_k": 1}, TP),
        ("distillation", {**ONLINE, "top_k": 1}, PP),
    ],
    ids=str,
)
def test_as_the_stock_trainer(
    kind: str, given: dict[str, Any], helix: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "words")
    if "saved" in given:
        model("Llama", 0).to(torch.bfloat16).save_pretrained(tmp_path / "model")
        given = {**given, "saved": str(tmp_path / "model")}
    job = {"tokenizer": str(tmp_path / "words"), "kind": kind, "given": given}
    wanted = follow(str(tmp_path / "stock"), helix=None, **job)
    close = 2e-2 if given.get("bf16") else 1e-4
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix, **job):
        for found, stock in zip(result, wanted, strict=True):
            assert found == pytest.approx(stock, rel=close, abs=close / 5)
