"""What Trainer users are used to, on models whose families are derived: as the stock Trainer does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs, loading_jobs, peft_jobs, resume_jobs
from support.models import arguments, sequences, tiny
from support.parity import check, references
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from hf_helix import HelixConfig, HelixTrainer

HOME = "support.derived_models:"
GEMMA2, PHI3, QWEN2_MOE = (
    {"family": f"{HOME}{name}", "num_hidden_layers": 2} for name in ("gemma2", "phi3", "qwen2_moe")
)
MODELS = {"gemma2": GEMMA2, "phi3": PHI3, "qwen2_moe": QWEN2_MOE}
TP = {"tp_size": 2, "plan": "greedy"}


@pytest.mark.parametrize("name", MODELS)
def test_training_and_what_is_saved(name: str, cluster_of: Any, tmp_path: Path) -> None:
    """Losses, norms and the evaluation of the stock Trainer; stock Transformers loads what was saved."""
    training = {"max_steps": 3, "gradient_accumulation_steps": 2}
    stock = jobs.train(str(tmp_path / "stock"), None, model=MODELS[name], training=training)
    folder = tmp_path / "split"
    ranks = cluster_of(2).run("train", folder=str(folder), helix=TP, model=MODELS[name], training=training)
    for found in ranks:
        np.testing.assert_allclose(found["losses"], stock["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found["norms"], stock["norms"], rtol=1e-4)
        assert found["eval"] == pytest.approx(stock["eval"], abs=1e-5)
        assert found["flos"] == stock["flos"]
    saved, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / part) for part in ("split", "stock"))
    for (key, value), other in zip(saved.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_predictions(name: str, cluster_of: Any, tmp_path: Path) -> None:
    rows = sequences(3, seed=9)
    (found, _) = cluster_of(2).run(predictions, folder=str(tmp_path), helix=TP, model=MODELS[name])
    model = tiny(**MODELS[name]).eval()
    for row, logits in zip(rows, found, strict=True):
        np.testing.assert_allclose(logits, model(row["input_ids"][None]).logits[0].detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_recompute(name: str, recompute: str, cluster_of: Any, tmp_path: Path) -> None:
    check(cluster_of(2), tmp_path, references(), (1, 2, 1, 1), "left", ["greedy"], recompute=recompute, **MODELS[name])


LORA: dict[str, dict[str, Any]] = {
    "gemma2": {"target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"]},
    "phi3": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "qwen2_moe": {"target_modules": ["q_proj", "o_proj"]},
}


@pytest.mark.parametrize("name", LORA)
def test_adapters(name: str, cluster_of: Any, tmp_path: Path) -> None:
    """Trained, saved as PEFT saves, loaded by PEFT, trained on."""
    model = {**MODELS[name], "lora": LORA[name]}
    training = {"max_steps": 2, "gradient_accumulation_steps": 2}
    stock = jobs.train(str(tmp_path / "stock"), None, model=model, training=training)
    folder = str(tmp_path / "split")
    (found, _) = cluster_of(2).run("train", folder=folder, helix=TP, model=model, training=training)
    np.testing.assert_allclose(found["losses"], stock["losses"], rtol=0, atol=1e-5)
    again = {"folder": str(tmp_path / "on"), "source": folder, "model": MODELS[name]}
    wanted = peft_jobs.go_on(helix=None, **{**again, "folder": str(tmp_path / "stock on")})
    (ours, _) = cluster_of(2).run("support.peft_jobs:go_on", helix=TP, **again)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_starts_from_a_folder(name: str, cluster_of: Any, tmp_path: Path) -> None:
    """Whole and cut, by the folder's name, by a model on the meta device."""
    tiny(**MODELS[name]).save_pretrained(tmp_path / "source")
    changes = {key: value for key, value in MODELS[name].items() if key != "family"}
    job = {"folder": str(tmp_path / "run"), "source": str(tmp_path / "source"), "changes": changes}
    ranks = cluster_of(2).run(loading_jobs.start_in_every_way, helix=TP, family=MODELS[name]["family"], **job)
    for found in ranks:
        assert found["differences"] == {"named": [], "meta": [], "again": []}
        assert all(losses == found["losses"][0] for losses in found["losses"])


def test_a_run_goes_on_in_another_layout(cluster_of: Any, tmp_path: Path) -> None:
    model = {**GEMMA2, "num_hidden_layers": 4}
    first = cluster_of(2).run(resume_jobs.run, folder=str(tmp_path), helix=TP, model=model)[0]
    checkpoint = str(tmp_path / "checkpoint-3")
    other = {"pp_size": 2, "plan": "greedy"}
    job = {"folder": str(tmp_path / "on"), "resume": checkpoint, "model": model}
    found = cluster_of(2).run(resume_jobs.run, helix=other, **job)[0]
    for step in (4, 5, 6):
        assert found["losses"][step] == pytest.approx(first["losses"][step], abs=1e-5)
    assert found["eval"] == pytest.approx(first["eval"], abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows(name: str, cluster_of: Any, tmp_path: Path) -> None:
    check(cluster_of(2), tmp_path, references(), (1, 2, 1, 1), "packed", ["greedy"], **MODELS[name])


def test_flattened_batches(cluster_of: Any, tmp_path: Path) -> None:
    rows = [{key: row[key].tolist() for key in row} for row in sequences(12, lengths=(9, 14))]
    options = {"model": GEMMA2, "training": {"max_steps": 2}, "train_dataset": rows}
    options["data_collator"] = DataCollatorWithFlattening(return_flash_attn_kwargs=False)
    stock = jobs.train(str(tmp_path / "stock"), None, **options)
    (found, _) = cluster_of(2).run("train", folder=str(tmp_path / "split"), helix=TP, **options)
    np.testing.assert_allclose(found["losses"], stock["losses"], rtol=0, atol=1e-5)


DROPOUT: dict[str, dict[str, Any]] = {
    "gemma2": {"attention_dropout": 0.2},
    "phi3": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attention_dropout": 0.1},
    "qwen2_moe": {"attention_dropout": 0.2},
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout(name: str, cluster_of: Any, tmp_path: Path) -> None:
    """Draws the same in every plan, and again; and does draw."""
    case = {"cases": [("sequential", "folded_1f1b", 3), ("greedy", "folded_1f1b", 3)], "lengths": (9,)}
    model = {**MODELS[name], **DROPOUT[name]}
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, **case}
    first, second = (cluster_of(2).run("support.pipeline_jobs:windows", model=model, **job)[0] for _ in range(2))
    dry = cluster_of(2).run("support.pipeline_jobs:windows", model=MODELS[name], **job)[0]
    assert first[0]["losses"] != dry[0]["losses"]
    for found in (first[1], second[0], second[1]):
        assert found["losses"] == first[0]["losses"]
        for key, gradient in first[0]["gradients"].items():
            np.testing.assert_array_equal(found["gradients"][key], gradient, err_msg=key)


@pytest.mark.parametrize("name", ["phi3", "qwen2_moe"])  # Gemma 2 is eager anyway
def test_other_attention(name: str, cluster_of: Any, tmp_path: Path) -> None:
    model = {**MODELS[name], "attn_implementation": "eager"}
    check(cluster_of(2), tmp_path, references(), (1, 2, 1, 1), "left", ["greedy"], **model)


def test_tables_that_are_not_tied(cluster_of: Any, tmp_path: Path) -> None:
    model = {**GEMMA2, "tie_word_embeddings": False}
    check(cluster_of(2), tmp_path, references(), (1, 2, 1, 1), "dense", ["greedy"], **model)
    check(
        cluster_of(2),
        tmp_path,
        references(),
        (1, 1, 2, 1),
        "dense",
        ["greedy"],
        **{**PHI3, "tie_word_embeddings": True},
    )


@pytest.mark.slow
def test_compiled_operators(cluster_of: Any, tmp_path: Path) -> None:
    training = {"max_steps": 2}
    plain, compiled = (
        cluster_of(2).run("train", folder=str(tmp_path), helix={**TP, "compile": on}, model=GEMMA2, training=training)
        for on in (False, True)
    )
    np.testing.assert_allclose(compiled[0]["losses"], plain[0]["losses"], rtol=0, atol=1e-5)


def test_noise_on_embeddings_is_refused(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), max_steps=1, neftune_noise_alpha=1.0)
    options: dict[str, Any] = {"args": args, "train_dataset": sequences(4), "helix_config": HelixConfig()}
    with pytest.raises(ValueError, match="neftune_noise_alpha"):
        HelixTrainer(model=tiny(**GEMMA2), **options).train()


# In the processes of a cluster


def predictions(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> Any:
    return jobs.build(folder, helix, model=tiny(**model)).predict(sequences(3, seed=9)).predictions
