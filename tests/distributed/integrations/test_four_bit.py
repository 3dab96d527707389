"""QLoRA: LoRA on a base in 4 bits, against the stock Trainer and TRL's own trainers on the same base; refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from support import jobs
from support.comparisons import compare_adapters
from support.marks import slow
from support.models import adapted, arguments, four_bit, llama, tiny

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.runtime.divided import plain_parameters

MODEL: dict[str, Any] = {
    "family": "support.models:four_bit",
    "num_hidden_layers": 5,
    "quantization": {"bnb_4bit_use_double_quant": True},
    "lora": {},
}
TRAINING = {"max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}


@plain_parameters()
def packed_bytes(model: Any) -> int:
    return sum(weight.nbytes for weight in model.parameters() if weight.dtype is torch.uint8)


def train(folder: str, helix: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """As `jobs.train`, without an evaluation: bitsandbytes computes it in bfloat16 on some CPUs."""
    trainer = jobs.make_trainer(folder, helix, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(folder)
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "flos": trainer.state.total_flos,
        "packed": packed_bytes(trainer.model),
    }


TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}
CASES = [
    # options, data-parallel ranks, changes to the model, by how much less exactly than 1e-5 adapters are compared
    (TP, 1, {"num_hidden_layers": 2}, 1),
    slow(PP, 1, {}, 1),
    slow(CP, 1, {}, 10),
    slow({"shard_parameters": True}, 2, {}, 1),
    slow({"shard_optimizer": True}, 2, {}, 1),
    slow({**TP, **PP}, 1, {}, 1),
    slow(TP, 1, {"lora": {"use_dora": True}}, 10),
    slow({"shard_parameters": True}, 2, {"lora": {"use_dora": True}}, 10),
    slow(TP, 1, {"quantization": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16}}, 10),
    slow(TP, 1, {"loaded_as": "bfloat16", "prepared": True}, 10),
    slow(TP, 1, {"of": "gpt2", "n_inner": 256, "lora": {"target_modules": ["c_attn", "c_proj", "c_fc"]}}, 10),
]


@pytest.mark.parametrize(("layout", "dp", "model", "factor"), CASES, ids=str)
def test_training_equals_the_stock_trainer(
    layout: dict[str, Any], dp: int, model: dict[str, Any], factor: float, cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """What is logged and saved; and ranks of tp and pp hold their parts of the packed weights."""
    case = {"model": {**MODEL, **model}, "training": TRAINING}
    expected, theirs = stock(train, dp=dp, **case)
    ranks = 4 if layout == {**TP, **PP} else 2
    results = cluster_of(ranks).run(train, folder=str(tmp_path), helix={"plan": "greedy", **layout}, **case)
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)
        assert result["flos"] == pytest.approx(expected["flos"])
    compare_adapters(tmp_path, Path(theirs), factor=factor / 10)
    if layout in (TP, PP) and "quantization" not in model:  # else they are stored as bf16, and ours as bytes
        assert sum(result["packed"] for result in results) == expected["packed"]
        assert all(result["packed"] for result in results)
    if layout == TP:
        assert len({result["packed"] for result in results}) == 1


def generated(folder: str, helix: dict[str, Any] | None) -> list[list[int]]:
    """Twelve tokens, of the uncut model where `helix` is None."""
    model = tiny(**MODEL)
    if helix is not None:
        HelixTrainer(model=model, args=arguments(folder), helix_config=HelixConfig(plan="greedy", **helix))
    ids = torch.arange(1, 9).unsqueeze(0)
    length = {"min_new_tokens": 12, "max_new_tokens": 12}
    model.train(helix is None)  # in evaluation, bitsandbytes computes an uncut model in bfloat16 on some CPUs
    return model.generate(input_ids=ids, do_sample=False, pad_token_id=0, **length).tolist()


@pytest.mark.slow
def test_generation(cluster_of: Any, tmp_path: Path) -> None:
    wanted = generated(str(tmp_path), None)
    assert cluster_of(2).run(generated, folder=str(tmp_path), helix=TP) == [wanted] * 2


@pytest.mark.slow
def test_a_run_goes_on_with_another_layout(cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "model": MODEL}
    steps = {**TRAINING, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    cut = cluster_of(2).run(train, helix={"tp_size": 2, "plan": "greedy"}, training=steps, **job)
    again = cluster_of(2).run(resumed, helix={"pp_size": 2, "plan": "greedy"}, training=steps, **job)
    np.testing.assert_allclose(again[0], cut[0]["losses"], rtol=1e-5)


def resumed(folder: str, helix: dict[str, Any], **options: Any) -> list[float]:
    trainer = jobs.make_trainer(folder, helix, **options)
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- TRL -----------------------------------------------------------------------------------------------------------

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def fine_tune(folder: str, tokenizer: str, helix: dict[str, Any] | None, source: str) -> list[dict[str, Any]]:
    """SFTTrainer reads the base and adds the adapters."""
    from support import sft_jobs  # TRL takes seconds to import
    from transformers import BitsAndBytesConfig

    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    training = {"model_init_kwargs": {"quantization_config": packing}, "max_steps": 3}
    options = {"model": source, "peft_config": LoraConfig(**LORA, task_type="CAUSAL_LM")}
    trainer = sft_jobs.make(folder, tokenizer, helix, training, "completions", **options)
    trainer.train()
    trainer.save_model(folder)
    return trainer.state.log_history


@pytest.mark.slow
def test_the_trainer_of_trl(cluster_of: Any, tmp_path: Path) -> None:
    from support.sft_jobs import VOCABULARY, save_tokenizer

    save_tokenizer(tmp_path / "words")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    llama(vocab_size=VOCABULARY, max_position_embeddings=512, **sizes).save_pretrained(tmp_path / "base")
    given = {"tokenizer": str(tmp_path / "words"), "source": str(tmp_path / "base")}
    wanted = fine_tune(str(tmp_path / "theirs"), helix=None, **given)
    for result in cluster_of(2).run(fine_tune, folder=str(tmp_path / "ours"), helix=TP, **given):
        for found, entry in zip(result[:-1], wanted[:-1], strict=True):
            both = {key: found[key] for key in entry.keys() & found.keys()}
            assert {"loss", "grad_norm"} <= both.keys()
            # Adapters, and their gradients, are in bfloat16.
            assert both == pytest.approx({key: entry[key] for key in both}, rel=1e-2, abs=1e-3)
    compare_adapters(tmp_path / "ours", tmp_path / "theirs", factor=500)


# -- refusals ------------------------------------------------------------------------------------------------------


def refused(model: Any, folder: Path, *words: str) -> None:
    with pytest.raises(ValueError, match=".*".join(words)):
        HelixTrainer(model=model, args=arguments(str(folder)), helix_config=HelixConfig(plan="greedy"))


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    uneven = four_bit(num_hidden_layers=1, intermediate_size=160)
    refused(adapted(uneven), tmp_path, "down_proj has blocks of 64 elements, and rows of 160", "llm_int8_skip_modules")
    refused(four_bit(num_hidden_layers=1), tmp_path, "weights in 4 bits and no adapters", "hand over a PeftModel")
    other = llama(num_hidden_layers=1)
    other.hf_quantizer = object()
    refused(adapted(other), tmp_path, "quantised", "bitsandbytes in 4 bits", "load_in_4bit=True")


def test_merging_is_refused(tmp_path: Path) -> None:
    model = tiny(**{**MODEL, "num_hidden_layers": 1})
    HelixTrainer(model=model, args=arguments(str(tmp_path)), helix_config=HelixConfig(plan="greedy"))
    assert isinstance(model, PeftModel)
    with pytest.raises(RuntimeError, match=r"cannot be merged here.*load the base in 16 bits"):
        model.merge_and_unload()


def test_a_cut_through_blocks_is_refused(cluster_of: Any, tmp_path: Path) -> None:
    job = {"helix": {"tp_size": 2, "plan": "greedy"}, "model": {**MODEL, "intermediate_size": 192}}
    words = "a row of 192 elements has 3 blocks of 64", "use tp_size=1"
    cluster_of(2).assert_raises("construct", *words, folder=str(tmp_path), **job)
