"""TRL's SFTTrainer under the mixin trains as the stock one does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptEncoderConfig
from safetensors.torch import load_file
from support import sft_jobs
from support.models import arguments, llama
from transformers import AutoModelForCausalLM, Trainer

from hf_helix import HelixConfig, HelixTrainerMixin

JOBS = "support.sft_jobs:"
KINDS: dict[str, dict[str, Any]] = {
    "completions": {"kind": "completions", "training": {}},
    "whole": {"kind": "completions", "training": {"completion_only_loss": False}},
    "packed": {"kind": "completions", "training": {"packing": True}},
    "packed text": {"kind": "text", "training": {"packing": True, "eval_packing": False}},
    "wrapped": {"kind": "text", "training": {"packing": True, "packing_strategy": "wrapped"}},
    "padding-free": {"kind": "text", "training": {"padding_free": True, "max_length": None}},
    "recomputed": {"kind": "text", "training": {"packing": True, "gradient_checkpointing": True}},
    "assistant": {"kind": "conversations", "training": {"assistant_only_loss": True}},
    "dft": {"kind": "completions", "training": {"loss_type": "dft"}},
}
IN_ONE_ROW = ("packed", "packed text", "padding-free", "recomputed")
TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    sft_jobs.save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Any:
    @cache
    def run(name: str) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("stock")
        return sft_jobs.train(str(folder), tokenizer, None, **KINDS[name]), folder

    return run


FAST = (("completions", "tp_size"),)


@pytest.mark.parametrize(
    ("name", "helix"),
    [
        pytest.param(name, helix, marks=() if (name, next(iter(helix))) in FAST else pytest.mark.slow)
        for name in KINDS
        for helix in (TP, PP)
    ]
    + [pytest.param("packed", CP, marks=pytest.mark.slow)],
    ids=str,
)
def test_as_the_stock_trainer(
    name: str, helix: dict[str, Any], cluster_of: Any, tmp_path: Path, stock: Any, tokenizer: str
) -> None:
    wanted, folder = stock(name)
    assert (wanted["documents"] > wanted["rows"] == 1) == (name in IN_ONE_ROW)
    assert (wanted["trained"] < 0.65) == (name in ("completions", "packed", "assistant", "dft"))
    for result in cluster_of(2).run(
        JOBS + "train", folder=str(tmp_path), tokenizer=tokenizer, helix=helix, **KINDS[name]
    ):
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=1e-4)
        assert result["eval"] == pytest.approx(wanted["eval"], abs=1e-5)
    assert {entry for entry in result["logged"] if not entry.startswith("helix/")} == set(wanted["logged"])
    for figure, values in wanted["figures"].items():
        np.testing.assert_allclose(result["figures"][figure], values, rtol=1e-5, err_msg=figure)
    saved, whole = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path, folder))
    assert saved.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.linalg.norm(saved[key] - value) <= 1e-4 * torch.linalg.norm(value), key
    card = (tmp_path / "README.md").read_text()
    assert "- sft" in card
    assert "Trained with hf_helix" in card


def test_figures_over_data_parallel_ranks(cluster_of: Any, tmp_path: Path, tokenizer: str) -> None:
    """As those of two ranks with the stock trainer; the best model is chosen by one of them."""
    every = dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | {"eval_steps": 2, "save_steps": 2}
    best = {"metric_for_best_model": "mean_token_accuracy", "load_best_model_at_end": True}
    given = {"tokenizer": tokenizer, "kind": "completions", "training": {**every, **best}}
    wanted, result = (
        cluster_of(2).run(JOBS + "train", folder=str(tmp_path / str(helix)), helix=helix, **given)[0]
        for helix in (None, {})
    )
    for figure, values in wanted["figures"].items():
        np.testing.assert_allclose(result["figures"][figure], values, rtol=1e-5, err_msg=figure)
    assert result["best"] == pytest.approx(wanted["best"], rel=1e-5)
    assert wanted["best"] > 0


def test_what_is_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ValueError, match="activation_offloading=True: use activation_offloading=False"):
        sft_jobs.make(str(tmp_path), tokenizer, {}, {"activation_offloading": True}, "text")
    tuned = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8)
    with pytest.raises(ValueError, match=r"PromptEncoderConfig \(P_TUNING\): use .*LoraConfig.*, or the stock Trainer"):
        sft_jobs.make(str(tmp_path), tokenizer, {}, {}, "text", peft_config=tuned)
    with pytest.raises(ValueError, match=r"output_router_logits = False \(in TRL router_aux_loss_coef=0.0"):
        sft_jobs.make(str(tmp_path), tokenizer, {}, {}, "text", family="mixtral")


@pytest.mark.slow
def test_experts_without_the_loss_of_routers(cluster_of: Any, tmp_path: Path, tokenizer: str) -> None:
    options = {"kind": "text", "training": {"router_aux_loss_coef": 0.0}, "family": "mixtral"}
    wanted = sft_jobs.train(str(tmp_path / "stock"), tokenizer, None, **options)
    given = {"folder": str(tmp_path / "helix"), "tokenizer": tokenizer, "helix": TP, **options}
    for result in cluster_of(2).run(JOBS + "train", **given):
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_from_the_name_of_a_folder(dtype: str | None, cluster_of: Any, tmp_path: Path, tokenizer: str) -> None:
    """TRL loads in fp32 unless it is told otherwise."""
    made = llama(num_hidden_layers=4, vocab_size=sft_jobs.VOCABULARY).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "model")
    training = {"model_init_kwargs": {"dtype": dtype} if dtype else None}
    options = {"kind": "completions", "training": training, "model": str(tmp_path / "model")}
    wanted = sft_jobs.train(str(tmp_path / "stock"), tokenizer, None, **options)
    given = {"folder": str(tmp_path / "helix"), "tokenizer": tokenizer, "helix": TP, **options}
    for result in cluster_of(2).run(JOBS + "train", **given):
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-2 if dtype else 1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "helix")
    assert saved.dtype is (torch.bfloat16 if dtype else torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("helix", [TP, PP], ids=str)
def test_adapters(helix: dict[str, Any], cluster_of: Any, tmp_path: Path, tokenizer: str) -> None:
    """`peft_config=` as for TRL. The adapters are saved as PEFT saves them."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    options = {"kind": "completions", "training": {"packing": True}, "peft_config": lora}
    wanted = sft_jobs.train(str(tmp_path / "stock"), tokenizer, None, **options)
    given = {"folder": str(tmp_path / "helix"), "tokenizer": tokenizer, "helix": helix, **options}
    for result in cluster_of(2).run(JOBS + "train", **given):
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=1e-4)
    saved, whole = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("helix", "stock"))
    assert saved.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.linalg.norm(saved[key] - value) <= 1e-4 * torch.linalg.norm(value), key


def test_a_name_with_adapters_and_plain_arguments(cluster_of: Any, tmp_path: Path, tokenizer: str) -> None:
    """What SFTTrainer takes: `TrainingArguments`, and `peft_config=` with the name of a model."""
    made = llama(num_hidden_layers=2, vocab_size=sft_jobs.VOCABULARY, max_position_embeddings=512).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "model")
    options = {
        "kind": "completions",
        "training": {"is_plain": True},
        "model": str(tmp_path / "model"),
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    }
    wanted = sft_jobs.train(str(tmp_path / "stock"), tokenizer, None, **options)
    for result in cluster_of(2).run(
        JOBS + "train", folder=str(tmp_path / "helix"), tokenizer=tokenizer, helix=TP, **options
    ):
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=1e-4)


def test_a_model_that_is_replaced(tmp_path: Path) -> None:
    class Replacing(Trainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "model": llama()})

    class Mine(HelixTrainerMixin, Replacing):
        pass

    class Late(HelixTrainerMixin, Replacing):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.model = llama()

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}]
    options = {"model": llama(), "args": arguments(str(tmp_path)), "helix_config": HelixConfig(), "train_dataset": rows}
    trainer = Mine(**options)
    assert trainer.model is trainer.helix.model is not options["model"]
    with pytest.raises(ValueError, match="Late has replaced the model after it was cut, by a LlamaForCausalLM"):
        Late(**options).train()
