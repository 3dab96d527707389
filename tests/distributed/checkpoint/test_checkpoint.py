"""What a cut model saves is the Hugging Face checkpoint of the whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparisons import assert_same, stored
from support.models import VOCABULARY, arguments, llama, tiny, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from hf_helix import HelixConfig, HelixTrainer

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases, mha": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
}


def save_untrained(
    folder: str, tp_size: int, model: dict[str, Any], own_weights: bool = False, with_tokenizer: bool = False
) -> None:
    """Save a model as it was before training. `own_weights`: ranks other than 0 start from other ones."""
    made = tiny(**model)
    if own_weights and dist.get_rank() > 0:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_()
    options = {"processing_class": word_tokenizer()} if with_tokenizer else {}
    helix = HelixConfig(tp_size=tp_size)
    HelixTrainer(model=made, args=arguments(folder), helix_config=helix, **options).save_model()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp_size", [2, 1])
def test_saves_the_model_bit_for_bit(model: str, tp_size: int, cluster_of: Any, tmp_path: Path) -> None:
    original = llama(**MODELS[model])
    cluster_of(2).run(save_untrained, folder=str(tmp_path), tp_size=tp_size, model=MODELS[model])
    # As transformers saves it: a tied weight once, under the embedding's name.
    original.save_pretrained(tmp_path / "stock")
    assert_same(stored(tmp_path), stored(tmp_path / "stock"))
    loaded, how = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(how[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(loaded.state_dict(), original.state_dict())
    ids = torch.arange(1, 18).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, original.eval()(ids).logits)


def test_config_is_the_one_that_the_stock_trainer_saves(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).run(save_untrained, folder=str(tmp_path), tp_size=2, model={})
    Trainer(model=llama(), args=arguments(str(tmp_path / "stock"))).save_model()
    for name in ("config.json", "generation_config.json"):
        result, expected = (json.loads((folder / name).read_text()) for folder in (tmp_path, tmp_path / "stock"))
        assert result == expected


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_an_older_save_is_replaced(shard_size: str, cluster_of: Any, tmp_path: Path) -> None:
    """Whether it was one file or more than the new one has; what else lies in the folder stays."""
    older = llama(num_hidden_layers=4)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.fill_(7.0)
    older.save_pretrained(tmp_path, max_shard_size=shard_size)
    (tmp_path / "notes.txt").write_text("mine")
    before = {path.name for path in tmp_path.glob("*.safetensors")}
    assert (len(before) > 6) == (shard_size == "20KB")
    cluster_of(2).run(save_untrained, folder=str(tmp_path), tp_size=2, model={})
    llama().save_pretrained(tmp_path / "stock")
    assert_same(stored(tmp_path), stored(tmp_path / "stock"))
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), llama().state_dict())


def test_other_weights_in_the_folder_stay(cluster_of: Any, tmp_path: Path) -> None:
    """`model_ema.safetensors` is nothing that Transformers would have written."""
    (tmp_path / "model_ema.safetensors").write_bytes(b"mine")
    cluster_of(2).run(save_untrained, folder=str(tmp_path), tp_size=2, model={})
    assert (tmp_path / "model_ema.safetensors").exists()


@pytest.mark.parametrize("tp_size", [2, 1])
def test_rank_0s_weights_count(tp_size: int, cluster_of: Any, tmp_path: Path) -> None:
    for model in MODELS.values():
        cluster_of(2).run(save_untrained, folder=str(tmp_path), tp_size=tp_size, model=model, own_weights=True)
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), llama(**model).state_dict())


def test_everything_else_that_a_folder_needs(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).run(save_untrained, folder=str(tmp_path), tp_size=2, model={}, with_tokenizer=True)
    names = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".safetensors")}
    expected = {"config.json", "generation_config.json", "training_args.bin"}
    assert expected <= names
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == {"[PAD]": 0, "a": 1}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == VOCABULARY
    args = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert isinstance(args, TrainingArguments)
    assert args.learning_rate == 1e-3
