"""TRL's SFTTrainer under the mixin trains as the stock one does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptEncoderConfig
from support import sft_jobs
from support.comparisons import compare_adapters, compare_weights
from support.marks import slow
from support.models import arguments, llama, sequences
from transformers import AutoModelForCausalLM, Trainer

from hf_helix import HelixConfig, HelixTrainerMixin

JOBS = "support.sft_jobs:"
KINDS: dict[str, dict[str, Any]] = {
    "completions": {"kind": "completions", "training": {}},
    "packed": {"kind": "completions", "training": {"packing": True}},
    "packed text": {"kind": "text", "training": {"packing": True, "eval_packing": False}},
    "padding-free": {"kind": "text", "training": {"padding_free": True, "max_length": None}},
    "assistant": {"kind": "conversations", "training": {"assistant_only_loss": True}},
    "dft": {"kind": "completions", "training": {"loss_type": "dft"}},
}
IN_ONE_ROW = ("packed", "packed text", "padding-free")
TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    sft_jobs.save_tokenizer(folder)
    return str(folder)


@pytest.fixture
def as_stock(cluster_of: Any, tmp_path: Path, tokenizer: str, stock: Any) -> Any:
    """`as_stock(helix, **options)` trains on two ranks as the stock trainer does; what both find, and the folders."""

    def compare(helix: dict[str, Any], near: float = 1e-5, **options: Any) -> tuple[Any, Any, Path, Path]:
        wanted, folder = stock(sft_jobs.train, tokenizer=tokenizer, **options)
        mine = tmp_path / "helix"
        ranks = cluster_of(2).run(JOBS + "train", folder=str(mine), tokenizer=tokenizer, helix=helix, **options)
        for result in ranks:
            np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=near)
            np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=10 * near)
            assert result["eval"] == pytest.approx(wanted["eval"], abs=near)
        return ranks[0], wanted, mine, Path(folder)

    return compare


@pytest.mark.parametrize(
    ("name", "helix"),
    [
        ("completions", TP),
        slow("packed", CP),
        slow("packed text", PP),
        slow("padding-free", TP),
        slow("assistant", PP),
        slow("dft", TP),
        slow("dft", PP),
    ],
    ids=str,
)
def test_as_the_stock_trainer(name: str, helix: dict[str, Any], as_stock: Any) -> None:
    result, wanted, folder, whole = as_stock(helix, **KINDS[name])
    assert result["own"] == (name == "dft")
    assert (wanted["documents"] > wanted["rows"] == 1) == (name in IN_ONE_ROW)
    assert (wanted["trained"] < 0.65) == (name in ("completions", "packed", "assistant", "dft"))
    assert {entry for entry in result["logged"] if not entry.startswith("helix/")} == set(wanted["logged"])
    for figure, values in wanted["figures"].items():
        np.testing.assert_allclose(result["figures"][figure], values, rtol=1e-5, err_msg=figure)
    compare_weights(folder, whole)
    card = (folder / "README.md").read_text()
    assert "- sft" in card
    assert "Trained with hf_helix" in card


@pytest.mark.slow
@pytest.mark.parametrize(("helix", "model"), [({}, {}), ({"ep_size": 2}, {"family": "mixtral"})], ids=str)
def test_figures_over_data_parallel_ranks(
    helix: dict[str, Any], model: dict[str, Any], cluster_of: Any, tmp_path: Path, tokenizer: str
) -> None:
    """As those of two ranks with the stock trainer; the best model is chosen by one of them."""
    every = dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | {"eval_steps": 2, "save_steps": 2}
    best = {"metric_for_best_model": "mean_token_accuracy", "load_best_model_at_end": True}
    given = {"tokenizer": tokenizer, "kind": "completions", "training": {**every, **best}, **model}
    wanted, result = (
        cluster_of(2).run(JOBS + "train", folder=str(tmp_path / str(layout)), helix=layout, **given)[0]
        for layout in (None, helix)
    )
    np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=1e-4)
    for figure, values in wanted["figures"].items():
        near = 5e-4 if figure == "eval_aux_loss" else 1e-5  # a token near a tie goes to the other expert
        np.testing.assert_allclose(result["figures"][figure], values, rtol=near, err_msg=figure)
    assert result["best"] == pytest.approx(wanted["best"], rel=1e-5)
    assert wanted["best"] > 0


def test_what_is_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ValueError, match="activation_offloading=True: use activation_offloading=False"):
        sft_jobs.make(str(tmp_path), tokenizer, {}, {"activation_offloading": True}, "text")
    tuned = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8)
    with pytest.raises(ValueError, match=r"PromptEncoderConfig \(P_TUNING\): use .*LoraConfig.*, or the stock Trainer"):
        sft_jobs.make(str(tmp_path), tokenizer, {}, {}, "text", peft_config=tuned)


@pytest.mark.parametrize(
    ("helix", "training", "options"),
    [
        (TP, {}, {}),
        slow(PP, {"packing": True}, {}),
        slow(CP, {"packing": True}, {}),
        slow(TP, {"padding_free": True, "max_length": None, "router_aux_loss_coef": 0.1}, {}),
        slow(PP, {"label_smoothing_factor": 0.1}, {}),
        slow(TP, {}, {"peft_config": LoraConfig(r=4, target_modules="all-linear")}),
    ],
    ids=str,
)
def test_experts(helix: dict[str, Any], training: dict[str, Any], options: dict[str, Any], as_stock: Any) -> None:
    """With the loss of routers, which TRL adds by itself, in the plan; smoothed labels leave it out."""
    result, wanted, *_ = as_stock(helix, kind="text", training=training, family="mixtral", **options)
    assert result["own"] == ("label_smoothing_factor" in training)
    assert "aux_loss" in wanted["figures"]
    assert wanted["figures"].keys() == result["figures"].keys()
    for figure, values in wanted["figures"].items():
        np.testing.assert_allclose(result["figures"][figure], values, rtol=1e-5, err_msg=figure)


def saved_model(folder: Path, layers: int) -> str:
    """The folder of a model in bf16."""
    made = llama(num_hidden_layers=layers, vocab_size=sft_jobs.VOCABULARY, max_position_embeddings=512)
    made.to(torch.bfloat16).save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.mark.slow
def test_from_the_name_of_a_folder(as_stock: Any, tmp_path: Path) -> None:
    """TRL loads in fp32 unless it is told otherwise."""
    training = {"model_init_kwargs": {"dtype": "bfloat16"}}
    *_, folder, _ = as_stock(TP, 1e-2, kind="completions", training=training, model=saved_model(tmp_path, 4))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype is torch.bfloat16


@pytest.mark.slow
def test_adapters(as_stock: Any) -> None:
    """`peft_config=` as for TRL. The adapters are saved as PEFT saves them."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    *_, folder, whole = as_stock(PP, kind="completions", training={"packing": True}, peft_config=lora)
    compare_adapters(folder, whole)


@pytest.mark.slow
def test_adapters_of_experts(as_stock: Any) -> None:
    """With the loss of routers that have adapters, too."""
    lora = LoraConfig(r=4, target_modules="all-linear")
    *_, folder, whole = as_stock(TP, kind="text", training={}, family="mixtral", peft_config=lora)
    compare_adapters(folder, whole)


def test_a_name_with_adapters_and_plain_arguments(as_stock: Any, tmp_path: Path) -> None:
    """What SFTTrainer takes: `TrainingArguments`, and `peft_config=` with the name of a model."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    options = {"kind": "completions", "training": {"is_plain": True}, "model": saved_model(tmp_path, 2)}
    as_stock(TP, **options, peft_config=lora)


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

    options = {"model": llama(), "args": arguments(str(tmp_path)), "helix_config": HelixConfig()}
    options["train_dataset"] = sequences(4)
    trainer = Mine(**options)
    assert trainer.model is trainer.helix.model is not options["model"]
    with pytest.raises(ValueError, match="Late has replaced the model after it was cut, by a LlamaForCausalLM"):
        Late(**options).train()
