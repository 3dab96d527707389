"""Weights from a folder, or drawn at random, into models that are cut; for a `Cluster`, "support.loading_jobs:..."."""

from __future__ import annotations

import os
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from support.models import arguments, sequences, tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.checkpoint.load import load_parameters
from hf_helix.runtime.divided import plain_parameters

STEPS = 2


def trainer_of(folder: str, helix: dict[str, Any], model: Any, **options: Any) -> HelixTrainer:
    args = arguments(folder, max_steps=STEPS, weight_decay=0.0)
    data = sequences(8, lengths=(16,))
    config = HelixConfig(**{"plan": "greedy", **helix})
    return HelixTrainer(model=model, args=args, train_dataset=data, helix_config=config, **options)


@plain_parameters()
def held(trainer: HelixTrainer) -> dict[str, Any]:
    """Everything that this rank has of a model, buffers and what is not trained included; of parameters that are
    spread, its parts."""
    model, shards = trainer.model, trainer.helix.runner.stage.shards
    result: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        mine = shards.get(tensor, tensor)
        result[name] = (mine.detach().clone(), mine.requires_grad)
    return result


def differences(result: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not equal bit for bit, in shape, type, or in being trained."""
    assert result.keys() == expected.keys()
    assert any(value.numel() == 0 for value, _ in expected.values()) or len(expected) > 10
    return [name for name, (value, trained) in expected.items() if not _same(result[name], value, trained)]


def _same(result: tuple[Tensor, bool], value: Tensor, trained: bool) -> bool:
    other, other_trained = result
    fits = other.shape == value.shape and other.dtype == value.dtype and other.device == value.device
    return fits and other_trained is trained and torch.equal(other, value)


def losses(trainer: HelixTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def outline(family: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model on the meta device."""
    config = tiny(family, **changes).config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@plain_parameters()
def start_in_every_way(
    folder: str, helix: dict[str, Any], source: str, family: str, changes: dict[str, Any], train: bool = False
) -> dict[str, Any]:
    """What a rank holds, and, if asked for, how it trains, from the checkpoint `source`: loaded whole and cut; from the
    folder, by its name; by a model on the meta device and the folder; and put into a model that was cut with other
    weights.
    """
    whole = trainer_of(folder, helix, AutoModelForCausalLM.from_pretrained(source))
    expected = held(whole)
    named = trainer_of(folder, helix, source)
    empty = outline(family, changes, whole.model.dtype)
    ours = [id(parameter) for parameter in empty.parameters()]
    meta = trainer_of(folder, helix, empty, weights=source)
    assert ours == [id(parameter) for parameter in meta.model.parameters()], "parameters stay the same objects"
    other = AutoModelForCausalLM.from_config(whole.model.config, dtype=whole.model.dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    again = trainer_of(folder, helix, other)
    load_parameters(again.model, again.helix.runner.stage, again.helix.mesh, source)
    result = {"named": named, "meta": meta, "again": again}
    return {
        "differences": {how: differences(held(trainer), expected) for how, trainer in result.items()},
        "losses": [losses(trainer) for trainer in (whole, named, meta, again) if train],
        "configurations": [
            [made.model.config.to_dict(), made.model.generation_config.to_dict()] for made in (whole, named)
        ],
        "bytes": sum(value.nbytes for value, _ in expected.values()),
    }


@plain_parameters()
def refused(folder: str, helix: dict[str, Any], source: str, model: dict[str, Any], own_folder: bool = False) -> None:
    """Load what does not fit into a cut model; nothing of it may change."""
    trainer = trainer_of(folder, helix, tiny(**model))
    before = held(trainer)
    source = f"{source}/{os.environ['RANK']}" if own_folder else source
    try:
        load_parameters(trainer.model, trainer.helix.runner.stage, trainer.helix.mesh, source)
    finally:
        assert not differences(held(trainer), before)


def construct(
    folder: str,
    helix: dict[str, Any],
    model: dict[str, Any],
    on_meta: bool = True,
    partly: str = "",
    adapters: bool = False,
    **options: Any,
) -> None:
    """Only construct, with a model on the meta device or not."""
    made = outline(model.pop("family", "llama"), model) if on_meta else tiny(**model)
    if partly:
        holder, _, name = partly.rpartition(".")
        real = torch.ones(made.get_parameter(partly).shape)
        setattr(made.get_submodule(holder), name, nn.Parameter(real))
    if adapters:
        with torch.device("meta"):
            made = get_peft_model(made, LoraConfig(target_modules=["q_proj"]))
    trainer_of(folder, helix, made, **options)


def construct_by_name(folder: str, helix: dict[str, Any], name: str, **options: Any) -> None:
    trainer_of(folder, helix, name, **options)


@plain_parameters()
def draw(folder: str, helix: dict[str, Any], family: str, changes: dict[str, Any], dtype: str = "float32") -> list[str]:
    """Start from a model on the meta device alone, train nothing, save; what is left on the meta device."""
    trainer = trainer_of(folder, helix, outline(family, changes, getattr(torch, dtype)))
    trainer.save_model(folder)
    return [name for name, (value, _) in held(trainer).items() if value.is_meta]
