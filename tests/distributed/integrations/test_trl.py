"""TRL's trainers under the mixin, unmodified: every logged figure of the stock trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.marks import slow
from support.sft_jobs import mixed, save_tokenizer

from hf_helix.runtime.divided import plain_parameters

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "dog", "while", "rain", "fell", "over", "hills")
CONFIG, HEADS, SCORES = "Config", "ForCausalLM", "ForSequenceClassification"
LEFT_OUT = ("eval_runtime", "eval_s", "train_", "helix", "epoch", "step_time")


def rows(kind: str, count: int) -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> str:
        return " ".join(WORDS[int(torch.randint(len(WORDS), (), generator=generator))] for _ in range(length))

    made = []
    for number in range(count):
        row: dict[str, Any] = {"prompt": text(5 + number % 3)}
        if kind == "kto":
            row |= {"completion": " " + text(4 + number % 4), "label": number % 2 == 0}
        elif kind in ("dpo", "synced", "reward"):
            row |= {"chosen": " " + text(4 + number % 4), "rejected": " " + text(6 - number % 3)}
        made.append(row)
    return Dataset.from_list(made)


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each)) % 7) / 7 for each in completions]


def follow(
    folder: str, tokenizer: str, helix: dict[str, Any] | None, kind: str, lora: bool = False, model: str = "Llama"
) -> dict[str, Any]:
    import transformers
    import trl
    from peft import LoraConfig

    online = kind in ("grpo", "rloo")
    name = {"reward": "Reward", "synced": "DPO"}.get(kind, kind.upper())
    stock, arguments = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    if model != "Llama":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    of_model = {name: getattr(transformers, f"{model}{name}") for name in (CONFIG, HEADS, SCORES)}
    config = of_model[CONFIG](vocab_size=283, num_key_value_heads=2, pad_token_id=words.pad_token_id, **sizes)
    config.num_labels = 1 if kind == "reward" else 2
    rows_of_rank = 2 if helix == SHARDS else 4  # data-parallel ranks share the rows of a batch out
    training: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": rows_of_rank,
        "per_device_eval_batch_size": rows_of_rank,
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    options: dict[str, Any] = {"train_dataset": rows(kind, 36), "processing_class": words}
    if online:
        training |= {"num_generations": 4, "max_completion_length": 8, "steps_per_generation": 2}
        training |= {"beta": 0.04 if lora else 0.0, "max_steps": 4}
        options["reward_funcs"] = variety
    else:
        training |= {"eval_strategy": "steps", "eval_steps": 3}
        options["eval_dataset"] = rows(kind, 8)
    if kind == "synced":
        training |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    if kind in ("dpo", "kto", "synced") and not lora:
        torch.manual_seed(7)  # of equal models, the sign of a difference is that of its rounding
        options["ref_model"] = of_model[HEADS](config)
    if lora:
        options["peft_config"] = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "down_proj" if model == "Llama" else "o_proj"]
        )
    torch.manual_seed(0)
    options["model"] = of_model[SCORES if kind == "reward" else HEADS](config)
    options["args"] = arguments(**training)
    trainer = mixed(stock, helix, **options)
    trainer.train()
    log = [
        {key: value for key, value in entry.items() if not key.startswith(LEFT_OUT)}
        for entry in trainer.state.log_history
    ]
    if helix is None:
        return {"log": log}
    reference, part = getattr(trainer, "ref_model", None), 0.0
    if reference is not None:
        full = sum(each.nbytes for each in reference.parameters())
        with plain_parameters():
            part = sum(each.untyped_storage().nbytes() for each in reference.parameters()) / full
    return {"log": log, "fused": trainer.helix.called_decoder.deferred_backward.num_fused, "part": part}


TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}
SHARDS = {"shard_parameters": True}


@pytest.mark.parametrize(
    ("kind", "helix", "lora", "model"),
    [("dpo", TP, False, "Llama")]
    + [
        slow(*case)
        for case in [
            ("dpo", PP, False, "Llama"),
            ("dpo", CP, False, "Llama"),
            ("dpo", SHARDS, False, "Llama"),
            ("synced", TP, False, "Llama"),
            ("synced", PP, False, "Llama"),
            ("dpo", TP, True, "Llama"),
            ("dpo", PP, True, "Llama"),
            ("kto", TP, False, "Llama"),
            ("kto", PP, False, "Llama"),
            ("reward", TP, False, "Llama"),
            ("reward", PP, False, "Llama"),
            ("grpo", TP, False, "Llama"),
            ("grpo", PP, False, "Llama"),
            ("grpo", CP, True, "Llama"),
            ("rloo", TP, True, "Llama"),
            ("dpo", TP, False, "Mixtral"),
            ("dpo", PP, False, "Mixtral"),
            ("dpo", CP, False, "Qwen3Moe"),
            ("dpo", TP, True, "Qwen3Moe"),
            ("kto", PP, False, "Qwen3Moe"),
            ("reward", TP, False, "Mixtral"),
            ("grpo", TP, False, "Qwen3Moe"),
            ("grpo", PP, False, "Mixtral"),
        ]
    ],
    ids=str,
)
def test_as_the_stock_trainer(
    kind: str, helix: dict[str, Any], lora: bool, model: str, cluster_of: Any, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "words")
    job = {"tokenizer": str(tmp_path / "words"), "kind": kind, "lora": lora, "model": model}
    wanted = follow(str(tmp_path / "stock"), helix=None, **job)
    assert ("aux_loss" in wanted["log"][0]) == (model != "Llama" and kind != "reward")
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix, **job):
        for found, stock in zip(result["log"], wanted["log"], strict=True):
            if helix == SHARDS:
                stock.pop("total_flos", None), found.pop("total_flos", None)  # smaller batches are padded less
            # Rewards are differences of log-probabilities of about 20, of which this is one millionth.
            assert found == pytest.approx(stock, rel=1e-4, abs=2e-5)
        assert result["part"] < 0.8 or helix == CP  # of a reference model, a rank holds as much as of the trained one
        assert result["fused"] == (8 if kind in ("grpo", "rloo") else 6)
