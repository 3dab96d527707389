"""Tiny models of images and text, rows with images, and the Trainer on both; "support.image_jobs:follow" is a job."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from support.jobs import build
from support.models import adapted
from torch import Tensor

from hf_helix.models.small_config import default_config

Row = dict[str, Any]
Collator = Callable[[Sequence[Row]], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A class with towers.

    Attributes:
        name: of the class.
        vision: sizes of the tower.
        changes: of the configuration.
        draw: the entries of an image beside its ids, and the number of its tokens.
        types: the entry with the kinds of tokens, if any.
        layers: of the language model.
    """

    name: str
    vision: Mapping[str, Any]
    draw: Callable[[torch.Generator], tuple[Row, int]]
    changes: Mapping[str, Any]
    types: str = ""
    layers: int = 4


def alone(generator: torch.Generator) -> tuple[Row, int]:
    """An image of one size, as a single token."""
    return {"pixel_values": torch.randn(1, 3, 28, 28, generator=generator)}, 1


def masked(generator: torch.Generator) -> tuple[Row, int]:
    """An image of one size with a mask of its pixels, as a single token."""
    pixels, _ = alone(generator)
    seen = torch.ones(1, 1, 28, 28, dtype=torch.long)
    return {"pixel_values": pixels["pixel_values"][None], "pixel_attention_mask": seen}, 1


def several(generator: torch.Generator) -> tuple[Row, int]:
    """Up to three images of one size."""
    count = int(torch.randint(1, 4, (), generator=generator))
    return {"pixel_values": torch.randn(count, 3, 28, 28, generator=generator)}, 4 * count


def sized(generator: torch.Generator) -> tuple[Row, int]:
    """An image of any size, in patches of 14, of which two by two are a token."""
    high, wide = (2 * int(n) for n in torch.randint(1, 4, (2,), generator=generator))
    pixels = torch.zeros(1, 3, 84, 84)
    pixels[:, :, : 14 * high, : 14 * wide] = torch.randn(1, 3, 14 * high, 14 * wide, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[14 * high, 14 * wide]])}, high * wide // 4


def patched(size: int) -> Callable[[torch.Generator], tuple[Row, int]]:
    """An image of any size as rows of patches, of which two by two are a token."""

    def draw(generator: torch.Generator) -> tuple[Row, int]:
        high, wide = (2 * int(n) for n in torch.randint(1, 4, (2,), generator=generator))
        pixels = torch.randn(high * wide, size, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, high, wide]])}, high * wide // 4

    return draw


SMALL = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = {**SMALL, "image_size": 28, "patch_size": 14}
QWEN = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 32,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "intermediate_size": 40,
}

TYPES = "mm_token_type_ids"

KINDS = {
    kind.name.removesuffix("ForConditionalGeneration"): kind
    for kind in (
        Kind("LlavaForConditionalGeneration", SQUARE, several, {}),
        Kind("Gemma3ForConditionalGeneration", SQUARE, several, {"mm_tokens_per_image": 4}, "token_type_ids"),
        Kind("Mistral3ForConditionalGeneration", {**SMALL, "image_size": 84, "patch_size": 14}, sized, {}),
        Kind(
            "Qwen2VLForConditionalGeneration",
            {**QWEN, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            patched(1176),
            {},
            TYPES,
        ),
        Kind(
            "Qwen2_5_VLForConditionalGeneration",
            {**QWEN, "out_hidden_size": 64, "window_size": 28, "fullatt_block_indexes": [1]},
            patched(1176),
            {},
            TYPES,
        ),
        Kind(
            "Qwen3_5ForConditionalGeneration",
            {**QWEN, "out_hidden_size": 64, "num_position_embeddings": 16},
            patched(1176),
            {},
            TYPES,
        ),
        Kind("SmolVLMForConditionalGeneration", SQUARE, masked, {"scale_factor": 2}),
        Kind("InternVLForConditionalGeneration", {**SMALL, "image_size": [28, 28], "patch_size": [14, 14]}, alone, {}),
        Kind("PaliGemmaForConditionalGeneration", SQUARE, several, {}, "token_type_ids"),
        Kind(
            "Qwen3VLForConditionalGeneration",
            {**QWEN, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
            patched(1176),
            {},
            TYPES,
            layers=8,
        ),
    )
}
"""The classes, by the name of the model."""


def model_of(kind: str, frozen: bool = False) -> Any:
    """A small model; `frozen`: without its towers."""
    about = KINDS[kind]
    config = default_config(about.name, about.layers)
    for name, value in about.vision.items():
        setattr(config.vision_config, name, value)
    for name, value in about.changes.items():
        setattr(config, name, value)
    if hasattr(config.vision_config, "projection_dim"):
        config.vision_config.projection_dim = 64
    torch.manual_seed(0)
    made = getattr(transformers, about.name)(config)
    for parameter in made.parameters():
        if not parameter.any():  # a projection of zeros would hide the images
            torch.nn.init.normal_(parameter.data, std=0.05)
    if frozen:
        text = {*made.get_decoder().parameters(), *made.get_output_embeddings().parameters()}
        for parameter in set(made.parameters()) - text:
            parameter.requires_grad_(False)
    return made


def rows_of(kind: str, count: int, seed: int = 3, with_text: bool = False) -> list[Row]:
    """Rows of 12 to 40 tokens with an image each; `with_text`: every second row without."""
    about, generator = KINDS[kind], torch.Generator().manual_seed(seed)
    config = default_config(about.name, 4)
    place = config.image_token_id
    rows = []
    for number in range(count):
        entries, tokens = about.draw(generator)
        if with_text and number % 2:
            entries, tokens = {}, 0
        before, after = (int(n) for n in torch.randint(5, 16, (2,), generator=generator))
        ids = torch.randint(3, 100, (before + tokens + after,), generator=generator)
        ids[before : before + tokens] = place
        types = torch.zeros_like(ids)
        types[before : before + tokens] = 1
        labels = torch.where(ids == place, -100, ids)
        rows.append({"input_ids": ids, "labels": labels, **({about.types: types} if about.types else {}), **entries})
    return rows


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Pads on the right; entries of images of all rows follow each other."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[Tensor]] = {}
    for row in rows:
        extra = longest - len(row["input_ids"])
        row = {**row, "attention_mask": torch.ones_like(row["input_ids"])}
        for name, value in row.items():
            if value.shape == row["input_ids"].shape:
                fill = -100 if name == "labels" else 0
                value = torch.nn.functional.pad(value, (0, extra), value=fill)[None]
            batch.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in batch.items()}


def trainer_of(
    folder: str,
    kind: str,
    helix: dict[str, Any] | None,
    frozen: bool = False,
    with_text: bool = False,
    lora: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> Any:
    """A HelixTrainer, or a stock one where `helix` is None; `lora` are options of `adapted`."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 3e-3,
        "remove_unused_columns": False,
        **(training or {}),
    }
    model = model_of(kind, frozen)
    given = {
        "model": model if lora is None else adapted(model, **lora),
        "train_dataset": rows_of(kind, 24, with_text=with_text),
        "eval_dataset": rows_of(kind, 4, 9),
        "data_collator": collate,
    }
    return build(folder, None if helix is None else {"plan": "greedy", "cache": False, **helix}, options, **given)


def follow(folder: str, kind: str, helix: dict[str, Any] | None, **options: Any) -> list[dict[str, float]]:
    """Trains, evaluates and saves; returns the figures of the log."""
    trainer = trainer_of(folder, kind, helix, **options)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(folder)
    names = ("loss", "grad_norm", "eval_loss")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def layers(folder: str, kind: str, helix: dict[str, Any]) -> int:
    """Returns the number of layers of this rank."""
    rank_units = trainer_of(folder, kind, helix).helix.runner.rank_units
    return sum(unit.graphs.forward.repeats for unit in rank_units.units.values())
