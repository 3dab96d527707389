"""TRL's trainers under the mixin, unmodified, with what scripts give them: every logged figure of the stock trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.marks import slow
from support.sft_jobs import VOCABULARY, mixed, pairs, save_tokenizer

from hf_helix.runtime.divided import plain_parameters

LEFT_OUT = ("eval_runtime", "eval_s", "train_", "helix", "epoch", "step_time")
ONLINE, PREFERENCES, TEACHERS = ("grpo", "rloo"), ("dpo", "kto", "synced"), ("gkd", "distillation")
LOSSES = ["sigmoid", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "apo_zero", "apo_down"]
REPEATED = {"repetition_penalty": 1.2, "entropy_coef": 0.01, "cast_lm_head_to_fp32": True}
LARGE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 7, "num_attention_heads": 8}
TP, PP, CP, SHARDS = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}, {"shard_parameters": True}


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


def model(family: str, seed: int, kind: str = "", **changes: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, **changes}
    if family not in ("Llama", "Qwen2", "Bert"):
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    labels = 1 if kind == "reward" else 2
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, num_labels=labels, **sizes
    )
    head = "SequenceClassification" if kind == "reward" else "CausalLM"
    return getattr(transformers, f"{family}For{head}")(config)


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each)) % 7) / 7 for each in completions]


def follow(
    folder: str, tokenizer: str, helix: dict[str, Any] | None, kind: str, shares: bool, given: dict[str, Any]
) -> dict[str, Any]:
    """The log of a short run, how many passes overlapped, and this rank's part of a reference model.

    Args:
        shares: whether data-parallel ranks share the rows of a batch out.
        given: training arguments, and `family`, `lora`, `resumes`, and `saved`, a folder of the model.
    """
    import random

    import trl
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    name = {"reward": "Reward", "synced": "DPO", "distillation": "Distillation"}.get(kind, kind.upper())
    stock = GKDTrainer if kind == "gkd" else getattr(trl, f"{name}Trainer")
    config: Any = GKDConfig if kind == "gkd" else getattr(trl, f"{name}Config")
    given = dict(given)
    family, lora, resumes = given.pop("family", "Llama"), given.pop("lora", False), given.pop("resumes", False)
    teacher, judge = given.pop("teacher", family), given.pop("judge", None)
    options: dict[str, Any] = {"model": given.pop("saved", None) or model(family, 0, kind)}
    size = 2 if shares and helix else 4
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
        options["peft_config"] = LoraConfig(r=4, target_modules=targets)

    def make(**more: Any) -> Any:
        whole = {**options, "args": config(**{**usual, **given, **more}), "train_dataset": on_disk(kind, folder)}
        whole["processing_class"] = AutoTokenizer.from_pretrained(tokenizer)
        random.seed(0)
        torch.manual_seed(0)
        return mixed(stock, helix, **whole)

    if resumes:
        make(save_strategy="steps", save_steps=2).train()
        options |= {"model": model(family, 3), "ref_model": model(family, 7)}
    trainer = make()
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
    log = trainer.state.log_history
    log = [{key: value for key, value in entry.items() if not key.startswith(LEFT_OUT)} for entry in log]
    if helix is None:
        return {"log": log}
    reference, part = getattr(trainer, "ref_model", None) or getattr(trainer, "teacher_model", None), 0.0
    if judge:
        (reference,) = trainer.reward_funcs
    if reference is not None:
        full = sum(each.nbytes for each in reference.parameters())
        with plain_parameters():
            part = sum(each.untyped_storage().nbytes() for each in reference.parameters()) / full
    return {"log": log, "fused": trainer.helix.session.called_decoder.deferred_backward.num_fused, "part": part}


@pytest.mark.parametrize(
    ("kind", "helix", "given"),
    [
        ("dpo", TP, {}),
        slow("dpo", CP, {}),
        slow("dpo", SHARDS, {}),
        slow("dpo", PP, {"lora": True}),
        slow("dpo", TP, {"family": "Mixtral"}),
        slow("dpo", TP, {"family": "Mixtral", "lora": True}),
        slow("dpo", TP, {"bf16": True}),
        slow("dpo", PP, {"resumes": True}),
        slow("dpo", TP, {"precompute_ref_log_probs": True}),
        slow("dpo", TP, {"saved": "in bf16"}),
        slow("dpo", TP, {"loss_type": LOSSES, "loss_weights": [1 / len(LOSSES)] * len(LOSSES), "label_smoothing": 0.1}),
        slow("dpo", PP, {"ld_alpha": 0.5, "use_weighting": True, "f_divergence_type": "js_divergence"}),
        slow("synced", PP, {}),
        slow("kto", TP, {}),
        slow("kto", PP, {"family": "Qwen3Moe"}),
        slow("reward", TP, {"family": "Mixtral"}),
        slow("reward", PP, {}),
        slow("grpo", TP, {}),
        slow("grpo", TP, {"num_iterations": 2, "importance_sampling_level": "sequence", "top_p": 0.9, **REPEATED}),
        slow("grpo", PP, {"family": "Mixtral"}),
        slow("grpo", CP, {"lora": True}),
        slow("rloo", TP, {"lora": True}),
        slow("gkd", PP, {"lmbda": 0.0}),
        slow("gkd", TP, {"lmbda": 0.0, "teacher": "Qwen2"}),
        slow("gkd", PP, {"lmbda": 0.0, "teacher": "Mixtral"}),
        slow("distillation", TP, {"max_completion_length": 6, "temperature": 0.9, "top_k": 1}),
        slow("distillation", PP, {"max_completion_length": 6, "temperature": 0.9, "top_k": 1, "teacher": "Qwen2"}),
        slow("grpo", TP, {"judge": "Qwen2"}),
        slow("grpo", PP, {"judge": "Bert"}),
    ],
    ids=str,
)
def test_as_the_stock_trainer(
    kind: str, helix: dict[str, Any], given: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "words")
    if "saved" in given:
        model("Llama", 0).to(torch.bfloat16).save_pretrained(tmp_path / "model")
        given = {**given, "saved": str(tmp_path / "model")}
    job = {"tokenizer": str(tmp_path / "words"), "kind": kind, "shares": helix == SHARDS, "given": given}
    wanted = follow(str(tmp_path / "stock"), helix=None, **job)
    assert ("aux_loss" in wanted["log"][0]) == ("family" in given and kind != "reward")
    # Rewards are differences of log-probabilities of about 20, of which this is one millionth.
    close = {"rel": 2e-2, "abs": 4e-3} if "bf16" in given else {"rel": 1e-4, "abs": 2e-5}
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix, **job):
        for found, stock in zip(result["log"], wanted["log"], strict=True):
            if helix == SHARDS:
                stock.pop("total_flos", None), found.pop("total_flos", None)  # smaller batches are padded less
            assert found == pytest.approx(stock, **close)
        # Of another model, a rank holds as much as of the trained one, unless nothing can cut it.
        assert (result["part"] < 0.8) == (helix != CP and given.get("judge") != "Bert")
        if kind not in TEACHERS and not given.keys() & {"resumes", "precompute_ref_log_probs", "judge"}:
            assert result["fused"] == (8 if kind in ONLINE else 6)
