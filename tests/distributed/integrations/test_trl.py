"""TRL's trainers under the mixin, unmodified, with what scripts give them: figures and gradients of the stock one."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.comparisons import compare_gradients
from support.marks import slow
from support.sft_jobs import save_tokenizer
from support.trl_jobs import ONLINE, TEACHERS, FirstGradients, log_of, make, model

from hf_helix.operators.vocabulary import head
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.runner import measured

LOSSES = ["sigmoid", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "apo_zero", "apo_down"]
REPEATED = {"repetition_penalty": 1.2, "entropy_coef": 0.01, "cast_lm_head_to_fp32": True}
TP, PP, CP, EP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}, {"ep_size": 2}
SHARDS, ZERO1 = {"shard_parameters": True}, {"shard_optimizer": True}
PLANNED = ("dpo", "synced", "kto")
LOSSES_OF_LOGS = ("loss", "eval_loss", "aux_loss", "eval_aux_loss", "train_loss")


def follow(
    folder: str, tokenizer: str, helix: dict[str, Any] | None, kind: str, shares: bool, given: dict[str, Any]
) -> dict[str, Any]:
    """The log and the first gradients of a short run, how many passes overlapped, and this rank's part of a reference
    model; see `make`.
    `resumes`: from a checkpoint of another run; `tiles`: the head of the cut model makes its logits in small tiles."""
    given = dict(given)
    if given.pop("tiles", False):
        with patch.multiple(head, TOKENS=5, ROWS=7):
            return follow(folder, tokenizer, helix, kind, shares, given)
    resumes = given.pop("resumes", False)
    common = {"folder": folder, "tokenizer": tokenizer, "helix": helix, "kind": kind, "shares": shares}
    if resumes:
        make(**common, given={**given, "save_strategy": "steps", "save_steps": 2}).train()
        given["model_seed"] = 3
    trainer = make(**common, given=given)
    gradients = FirstGradients(trainer)
    trainer.add_callback(gradients)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
    asks = getattr(trainer.model.config, "output_router_logits", None)
    if helix is None:
        return {"log": log_of(trainer), "gradients": gradients.found, "asks": asks}
    reference, part = getattr(trainer, "ref_model", None) or getattr(trainer, "teacher_model", None), None
    if "judge" in given:
        (reference,) = trainer.reward_funcs
    if reference is not None:
        full = sum(each.nbytes for each in reference.parameters())
        with plain_parameters():
            part = sum(each.untyped_storage().nbytes() for each in reference.parameters()) / full
    decoder = trainer.helix.session.called_decoder
    fused = "planned" if decoder is None else decoder.deferred_backward.num_fused
    result = {"log": log_of(trainer), "gradients": gradients.found, "asks": asks}
    return result | {"fused": fused, "part": part, "measured": str(trainer.tuning or "")}


def losses_of(result: dict[str, Any]) -> list[float]:
    """Every loss in a log."""
    return [entry[name] for entry in result["log"] for name in LOSSES_OF_LOGS if name in entry]


@pytest.mark.parametrize(
    ("kind", "helix", "given"),
    [
        ("dpo", TP, {}),
        slow("dpo", CP, {}),
        ("dpo", ZERO1, {}),
        slow("dpo", SHARDS, {}),
        slow("dpo", PP, {"lora": True}),
        slow("dpo", TP, {"family": "Mixtral"}),
        slow("dpo", PP, {"family": "Mixtral", "router_aux_loss_coef": 0.3}),
        slow("dpo", EP, {"family": "Mixtral", "router_aux_loss_coef": 0.0}),
        slow("dpo", EP, {"family": "Mixtral", "router_aux_loss_coef": 0.3}),
        slow("dpo", {**PP, "spread_vocabulary": True}, {}),
        slow("dpo", TP, {"disable_dropout": False}),
        slow("dpo", TP, {"doubles": "compute_loss"}),
        slow("dpo", TP, {"doubles": "training_step"}),
        slow("dpo", {**PP, "spread_vocabulary": True}, {"tiles": True}),
        slow("dpo", TP, {"tiles": True, "use_weighting": True, "lora": True}),
        slow("dpo", TP, {"family": "Mixtral", "lora": True}),
        slow("dpo", TP, {"bf16": True}),
        slow("dpo", PP, {"resumes": True}),
        slow("dpo", TP, {"precompute_ref_log_probs": True}),
        slow("dpo", TP, {"saved": "in bf16"}),
        slow("dpo", TP, {"loss_type": LOSSES, "loss_weights": [1 / len(LOSSES)] * len(LOSSES), "label_smoothing": 0.1}),
        slow("dpo", PP, {"ld_alpha": 0.5, "use_weighting": True, "f_divergence_type": "js_divergence"}),
        slow("synced", PP, {}),
        ("kto", TP, {}),
        slow("kto", PP, {"family": "Qwen3Moe"}),
        slow("kto", PP, {"lora": True}),
        slow("kto", CP, {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.7}),
        slow("kto", EP, {"family": "Mixtral", "router_aux_loss_coef": 0.3}),
        slow("kto", SHARDS, {}),
        slow("kto", ZERO1, {}),
        slow("kto", TP, {"precompute_ref_log_probs": True}),
        slow("kto", TP, {"bf16": True}),
        slow("kto", PP, {"doubles": "_compute_kl_logps"}),
        slow("reward", TP, {"family": "Mixtral"}),
        slow("reward", PP, {}),
        slow("grpo", TP, {}),
        slow("grpo", TP, {"num_iterations": 2, "importance_sampling_level": "sequence", "top_p": 0.9, **REPEATED}),
        slow("grpo", TP, {"cast_lm_head_to_fp32": True, "sizes": {"tie_word_embeddings": True}}),
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
    job = {"tokenizer": str(tmp_path / "words"), "kind": kind, "shares": helix in (SHARDS, ZERO1, EP), "given": given}
    alone = {**job, "folder": str(tmp_path / "stock"), "helix": None}
    wanted = cluster_of(2).run(follow, **alone)[0] if job["shares"] else follow(**alone)  # of shares, DDP
    has_routers = "family" in given and kind != "reward" and given.get("router_aux_loss_coef") != 0.0
    assert ("aux_loss" in wanted["log"][0]) == has_routers
    # Rewards are differences of log-probabilities of about 20, of which this is one millionth.
    close = {"rel": 2e-2, "abs": 4e-3} if "bf16" in given else {"rel": 1e-4, "abs": 2e-5}
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix, **job):
        for found, stock in zip(result["log"], wanted["log"], strict=True):
            if job["shares"]:
                stock.pop("total_flos", None), found.pop("total_flos", None)  # stock counts a process's share
            assert found == pytest.approx(stock, **close)
        if "bf16" not in given:
            np.testing.assert_allclose(losses_of(result), losses_of(wanted), rtol=0, atol=1e-5)
            compare_gradients(result["gradients"], wanted["gradients"])
        # Of another model, a rank holds as much as of the trained one, unless nothing can cut it.
        if result["part"] is not None:
            assert (result["part"] < 0.8) == (helix not in (CP, EP, ZERO1) and given.get("judge") != "Bert")
        assert result["asks"] == wanted["asks"]
        is_planned = kind in PLANNED and not given.keys() & {"disable_dropout", "doubles"}
        assert (result["fused"] == "planned") == is_planned
        if kind not in TEACHERS and not is_planned and not given.keys() & {"resumes", "judge"}:
            assert result["fused"] == (8 if kind in ONLINE else 6)


def test_calls_that_may_ask_for_routers_are_run_for_measurements(tmp_path: Path) -> None:
    """As tuning does between windows, without a gradient of the routers' logits."""
    save_tokenizer(tmp_path / "words")
    given = {"family": "Mixtral", "max_steps": 1, "eval_strategy": "no"}
    trainer = make(str(tmp_path), str(tmp_path / "words"), {}, "dpo", False, {**given, "disable_dropout": False})
    trainer.train()
    helix = trainer.helix
    with measured(helix.runner):
        assert helix.runner.train_window(helix.session.last_window[:2]) == []


def test_a_cast_after_the_table_of_a_head_is_refused(tmp_path: Path) -> None:
    """TRL's, of a model in bf16 whose head is in fp32."""
    save_tokenizer(tmp_path / "words")
    model("Llama", 0, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    given = {"saved": str(tmp_path / "model"), "cast_lm_head_to_fp32": True, "bf16": True}
    of_trl = (str(tmp_path), str(tmp_path / "words"), {}, "grpo", False)
    make(*of_trl, given)
    with pytest.raises(ValueError, match=r"embed_tokens has a forward hook.*cast_lm_head_to_fp32=False.*float32"):
        make(*of_trl, {**given, "model_init_kwargs": {"dtype": "bfloat16"}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "helix", "given"),
    [
        ("dpo", TP, {"family": "Mixtral"}),
        ("dpo", PP, {}),
        ("grpo", TP, {"family": "Mixtral", "lora": True}),
        ("kto", PP, {"family": "Qwen3Moe"}),
    ],
    ids=str,
)
def test_plans_are_measured_by_calls(
    kind: str, helix: dict[str, Any], given: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """From the second window on, also of mixtures, whose routers a call may ask for."""
    save_tokenizer(tmp_path / "words")
    given = {**given, "max_steps": 6}
    job = {"tokenizer": str(tmp_path / "words"), "kind": kind, "shares": False, "given": given}
    wanted = follow(str(tmp_path / "stock"), helix=None, **job)
    auto = {**helix, "plan": "auto", "tuning_share": 1.0}
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=auto, **job):
        assert "sequential" in result["measured"]
        for found, stock in zip(result["log"], wanted["log"], strict=True):
            assert found == pytest.approx(stock, rel=1e-4, abs=2e-5)
