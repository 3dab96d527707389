"""What a cut model saves is the Hugging Face checkpoint of the whole one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same, stored
from support.jobs import save_untrained
from support.models import VOCABULARY, arguments, llama, sequences, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from hf_helix import HelixConfig, HelixTrainerMixin

TP2 = {"tp_size": 2}


def test_config_is_the_one_that_the_stock_trainer_saves(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).run(save_untrained, folder=str(tmp_path), helix=TP2)
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
    cluster_of(2).run(save_untrained, folder=str(tmp_path), helix=TP2)
    llama().save_pretrained(tmp_path / "stock")
    assert_same(stored(tmp_path), stored(tmp_path / "stock"))
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), llama().state_dict())


def test_other_weights_in_the_folder_stay(cluster_of: Any, tmp_path: Path) -> None:
    """`model_ema.safetensors` is nothing that Transformers would have written."""
    (tmp_path / "model_ema.safetensors").write_bytes(b"mine")
    cluster_of(2).run(save_untrained, folder=str(tmp_path), helix=TP2)
    assert (tmp_path / "model_ema.safetensors").exists()


def test_everything_else_that_a_folder_needs(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).run(save_untrained, folder=str(tmp_path), helix=TP2, processing_class=word_tokenizer())
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


class Counting(Trainer):
    """Keeps a number of its own beside a checkpoint."""

    number = 0

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        Path(self.args.output_dir, "number").write_text("7")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.number = int(Path(checkpoint).parent.joinpath("number").read_text())


def test_what_a_class_behind_the_mixin_resumes(tmp_path: Path) -> None:
    """As TRL's GRPO does with adaptive entropy."""
    kind = type("CutCounting", (HelixTrainerMixin, Counting), {})
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1, "max_steps": 3}
    data = sequences(8)
    first, second = (
        kind(model=llama(), args=arguments(str(tmp_path), **options), train_dataset=data, helix_config=HelixConfig())
        for _ in range(2)
    )
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (first.number, second.number) == (0, 7)
    for name, weight in first.model.state_dict().items():
        assert weight.equal(second.model.state_dict()[name]), name
