"""Models of images and text under HelixTrainer: figures and saved weights of the stock Trainer."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.image_jobs import KINDS, collate, follow, model_of, rows_of, trainer_of
from support.marks import slow

MASKED = ("Gemma3", "PaliGemma")  # their code makes masks of images
LAYOUTS: list[dict[str, Any]] = [{"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}]
MORE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *[(kind, helix, {"frozen": True}) for kind in ("Gemma3", "Qwen2_5_VL") for helix in LAYOUTS[:2]],
    ("Llava", {"tp_size": 2}, {"with_text": True, "training": {"gradient_accumulation_steps": 1}}),
    ("Qwen3VL", {"tp_size": 2}, {"with_text": True, "training": {"gradient_accumulation_steps": 1}}),
    ("Qwen3VL", {"pp_size": 2}, {"frozen": True, "training": {"gradient_checkpointing": True}}),
    ("Qwen2_5_VL", {"tp_size": 2}, {"lora": {"idle": ""}}),
    ("Mistral3", {"tp_size": 2}, {"training": {"gradient_checkpointing": True}}),
    ("Gemma3", {"tp_size": 2}, {"training": {"bf16": True, "learning_rate": 1e-4}}),
]


def compare(cluster_of: Any, folder: Path, kind: str, helix: dict[str, Any], **options: Any) -> None:
    ours, stock = folder / "helix", folder / "stock"
    wanted = follow(str(stock), kind, None, **options)
    bound = 5e-3 if options.get("training", {}).get("bf16") else 1e-5
    for found in cluster_of(2).run("support.image_jobs:follow", folder=str(ours), kind=kind, helix=helix, **options):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=bound)
    name = "adapter_model.safetensors" if "lora" in options else "model.safetensors"
    saved, expected = load_file(ours / name), load_file(stock / name)
    assert saved.keys() == expected.keys()
    if bound == 1e-5:
        before = model_of(kind).state_dict()
        for weight, value in expected.items():
            moved = value - before[weight] if weight in before else value
            distance = torch.linalg.vector_norm(saved[weight] - value)
            # A gradient that is zero but for rounding (biases of keys) moves weights by its sign.
            near = 5e-3 * moved.norm() + 1e-6
            assert distance <= near or weight.endswith(("k_proj.bias", "qkv.bias")), weight


@pytest.mark.parametrize(
    ("kind", "helix"),
    [
        slow(kind, helix, when=(kind, helix) != ("Qwen2_5_VL", LAYOUTS[0]))
        for kind, helix in itertools.product(KINDS, LAYOUTS)
        if kind not in MASKED or helix != {"cp_size": 2}
    ],
    ids=str,
)
def test_as_the_stock_trainer(kind: str, helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Images of several sizes and numbers, towers trained."""
    compare(cluster_of, tmp_path, kind, helix)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "helix", "options"), MORE, ids=str)
def test_options(kind: str, helix: dict[str, Any], options: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Towers that are frozen, steps without images, adapters in towers, checkpointing of towers, autocast."""
    compare(cluster_of, tmp_path, kind, helix, **options)


@pytest.mark.slow
@pytest.mark.parametrize("helix", [{}, {"shard_parameters": True}, {"shard_optimizer": True}], ids=str)
def test_data_parallel_ranks(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """As DistributedDataParallel, whose ranks agree on the parameters of a tower that no loss reaches."""
    one = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
    stock = {"training": {**one, "ddp_find_unused_parameters": True}, "folder": str(tmp_path / "stock")}
    wanted = cluster_of(2).run("support.image_jobs:follow", kind="Llava", helix=None, **stock)[0]
    options = {"folder": str(tmp_path / "helix"), "kind": "Llava", "helix": helix, "training": one}
    for found in cluster_of(2).run("support.image_jobs:follow", **options):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_ranks_without_images(cluster_of: Any, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "kind": "Llava", "helix": {}, "with_text": True}
    options["training"] = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
    said = "with 2 data-parallel ranks, some have images in a step and others have none"
    cluster_of(2).assert_raises("support.image_jobs:follow", said, **options)


@pytest.mark.slow
def test_layers_make_room_for_a_tower(cluster_of: Any, tmp_path: Path) -> None:
    """With `image_share`, the rank of the tower has fewer layers, the first stage those with features of images."""
    compare(cluster_of, tmp_path, "Qwen3VL", {"pp_size": 2, "image_share": 0.5})
    options = {"folder": str(tmp_path), "kind": "Qwen3VL"}
    even, uneven = (
        cluster_of(2).run("support.image_jobs:layers", helix={"pp_size": 2, "image_share": share}, **options)
        for share in (0.0, 0.5)
    )
    assert sum(even) == sum(uneven) == 8
    assert uneven[0] < even[0]


@pytest.mark.slow
def test_too_few_layers_for_features(cluster_of: Any, tmp_path: Path) -> None:
    """Refused on every rank before the first window; text alone trains."""
    options = {"folder": str(tmp_path), "kind": "Qwen3VL", "helix": {"pp_size": 2, "layers_per_stage": [1, 3, 2, 2]}}
    said = "the first pipeline stage has 1 whole layers, and images add features behind 2"
    cluster_of(2).assert_raises("support.image_jobs:follow", said, **options)


def test_a_frozen_tower_keeps_nothing(tmp_path: Path) -> None:
    """Its features have no gradient, so autograd saves no activation of it."""
    trainer = trainer_of(str(tmp_path), "Llava", {}, frozen=True, training={"max_steps": 1})
    seen: list[bool] = []
    tower = trainer.model.model.vision_tower
    tower.register_forward_hook(lambda *args: seen.append(args[-1].last_hidden_state.requires_grad))
    trainer.train()
    assert seen == [False] * 2


def test_a_step_without_images_leaves_towers_alone(tmp_path: Path) -> None:
    trainer = trainer_of(str(tmp_path), "Llava", {})
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in rows_of("Llava", 2)]
    trainer.training_step(trainer.model, collate(rows))
    gradients = {name: parameter.grad is not None for name, parameter in trainer.model.named_parameters()}
    assert all(has == ("language_model" in name or "lm_head" in name) for name, has in gradients.items())


def test_refusals(tmp_path: Path) -> None:
    trainer = trainer_of(str(tmp_path), "Qwen2_5_VL", {})
    for name, value, words in (
        ("pixel_values_videos", torch.zeros(4, 1176), "videos or sound, which is not built.*leave it"),
        ("position_ids", torch.zeros(3, 2, 40).long(), "position_ids has 3 dimensions.*leave it out"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer.training_step(trainer.model, {**collate(rows_of("Qwen2_5_VL", 2)), name: value})


@pytest.mark.slow
def test_masks_of_images_over_a_shared_sequence(cluster_of: Any, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "kind": "Gemma3", "helix": {"cp_size": 2}}
    said = "cp_size=2: Gemma3ForConditionalGeneration makes attention masks of"
    cluster_of(2).assert_raises("support.image_jobs:follow", said, **options)
