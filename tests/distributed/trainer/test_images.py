"""Models of images and text under HelixTrainer: figures and saved weights of the stock Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.image_jobs import KINDS, collate, follow, model_of, rows_of, trainer_of
from support.marks import slow

TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}
RUNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((kind, TP, {}) for kind in KINDS),
    *((kind, PP, {}) for kind in ("Gemma3", "Qwen2_5_VL", "Qwen3VL", "Llava")),
    *((kind, CP, {}) for kind in ("Mistral3", "Qwen2VL", "Qwen3VL")),  # code of Gemma and PaliGemma makes masks
    ("Gemma3", TP, {"frozen": True}),
    ("Qwen2_5_VL", PP, {"frozen": True}),
    *((kind, TP, {"with_text": True, "training": {"gradient_accumulation_steps": 1}}) for kind in ("Llava", "Qwen3VL")),
    ("Qwen3VL", PP, {"frozen": True, "training": {"gradient_checkpointing": True}}),
    ("Qwen3VL", {**PP, "image_share": 0.5}, {}),
    ("Qwen2_5_VL", TP, {"lora": {"idle": ""}}),
    ("Mistral3", TP, {"training": {"gradient_checkpointing": True}}),
    ("Gemma3", TP, {"training": {"bf16": True, "learning_rate": 1e-4}}),
]


@pytest.mark.parametrize(
    ("kind", "helix", "options"), [slow(*run, when=run != ("Qwen2_5_VL", TP, {})) for run in RUNS], ids=str
)
def test_as_the_stock_trainer(kind: str, helix: dict[str, Any], options: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Images of several sizes and numbers, towers trained or frozen, steps without images, adapters in towers."""
    ours, stock = tmp_path / "helix", tmp_path / "stock"
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


@pytest.mark.slow
@pytest.mark.parametrize("helix", [{}, {"shard_parameters": True}], ids=str)
def test_data_parallel_ranks(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """As DistributedDataParallel, whose ranks agree on the parameters of a tower that no loss reaches."""
    one = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
    stock = {"training": {**one, "ddp_find_unused_parameters": True}, "folder": str(tmp_path / "stock")}
    wanted = cluster_of(2).run("support.image_jobs:follow", kind="Llava", helix=None, **stock)[0]
    options = {"folder": str(tmp_path / "helix"), "kind": "Llava", "helix": helix, "training": one}
    for found in cluster_of(2).run("support.image_jobs:follow", **options):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


TEXT = {"with_text": True, "training": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "helix", "options", "said"),
    [
        ("Llava", {}, TEXT, "with 2 data-parallel ranks, some have images in a step and others have none"),
        (
            "Qwen3VL",
            {**PP, "layers_per_stage": [1, 3, 2, 2]},
            {},
            "the first pipeline stage has 1 whole layers, and images add features behind 2",
        ),
        ("Gemma3", CP, {}, "cp_size=2: Gemma3ForConditionalGeneration makes attention masks of"),
    ],
)
def test_refusals_on_every_rank(
    kind: str, helix: dict[str, Any], options: Any, said: str, cluster_of: Any, tmp_path: Path
) -> None:
    job = {"folder": str(tmp_path), "kind": kind, "helix": helix, **options}
    cluster_of(2).assert_raises("support.image_jobs:follow", said, **job)


@pytest.mark.slow
def test_layers_make_room_for_a_tower(cluster_of: Any, tmp_path: Path) -> None:
    """With `image_share`, the rank of the tower has fewer layers, the first stage those with features of images."""
    options = {"folder": str(tmp_path), "kind": "Qwen3VL"}
    even, uneven = (
        cluster_of(2).run("support.image_jobs:layers", helix={**PP, "image_share": share}, **options)
        for share in (0.0, 0.5)
    )
    assert sum(even) == sum(uneven) == 8
    assert uneven[0] < even[0]


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
