"""What scripts do to a trainer's model between training and saving. Each kind is one job, under stock or cut."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from support.jobs import build
from support.models import sequences, tiny
from transformers import AutoModelForCausalLM


def merged(trainer: Any) -> None:
    trainer.model = trainer.model.merge_and_unload()


def averaged(trainer: Any) -> None:
    mean = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for parameter in mean.parameters():
            parameter.mul_(0.9)
    trainer.model = mean


@torch.no_grad()
def edited(trainer: Any) -> None:
    table = trainer.model.get_input_embeddings().weight
    table[90:] = table[:90].mean(0)


def resized(trainer: Any) -> None:
    torch.manual_seed(3)
    trainer.model.resize_token_embeddings(140)


def shortened(trainer: Any) -> None:
    trainer.model.model.layers = trainer.model.model.layers[:2]
    trainer.model.config.num_hidden_layers = 2


def replaced(trainer: Any) -> None:
    head = trainer.model.lm_head
    trainer.model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    with torch.no_grad():
        trainer.model.lm_head.weight.copy_(head.weight * 2)


def converted(trainer: Any) -> None:
    trainer.model.to(torch.bfloat16)


def untouched(trainer: Any) -> None:
    pass


KINDS = {
    "merged": merged,
    "averaged": averaged,
    "edited": edited,
    "resized": resized,
    "shortened": shortened,
    "replaced": replaced,
    "converted": converted,
    "adapters": untouched,
}


def save(folder: str, helix: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """What is in the files that are written after a few steps and a change, and the loss of what they load as."""
    lora = {} if kind in ("merged", "adapters") else None
    made = tiny(num_hidden_layers=4, lora=lora, tie_word_embeddings=kind == "resized")
    training = {"max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 2}
    trainer = build(folder, helix, training, model=made, train_dataset=sequences(8))
    trainer.train()
    KINDS[kind](trainer)
    out = Path(folder, "out")
    trainer.save_model(str(out))
    if dist.is_initialized():
        dist.barrier()
    tensors: dict[str, Any] = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    config = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {}
    base = tiny(num_hidden_layers=4) if lora is not None and not config else None
    loaded: Any = (
        PeftModel.from_pretrained(base, str(out)) if base is not None else AutoModelForCausalLM.from_pretrained(out)
    )
    ids = torch.stack([row["input_ids"] for row in sequences(2, seed=5)])
    with torch.no_grad():
        loss = loaded.float()(input_ids=ids, labels=ids).loss.item()
    return {
        "files": sorted(path.name for path in out.iterdir() if path.name != "README.md"),
        "shapes": {key: [list(value.shape), str(value.dtype)] for key, value in tensors.items()},
        "sums": [float(value.double().abs().sum()) for _, value in sorted(tensors.items())],
        "config": {key: config.get(key) for key in ("vocab_size", "num_hidden_layers", "dtype", "architectures")},
        "loss": loss,
    }
