"""Pipelines of which only upper layers are trained: frozen lower layers, or adapters in the last layers.

torch's own zero-bubble schedules lose gradients of such models (docs/layouts.md).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import jobs
from support.comparisons import compare_runs
from support.marks import slow
from support.models import tiny

LAYERS = 4
TRAINING = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}


def lower(layers: int) -> list[str]:
    """The parameters of the embedding and of the first layers."""
    starts = ("model.embed_tokens", *(f"model.layers.{layer}." for layer in range(layers)))
    return [name for name, _ in tiny(num_hidden_layers=LAYERS).named_parameters() if name.startswith(starts)]


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (2, {"pp_size": 2}),
        (3, {"pp_size": 2, "schedule": "dualpipe_v"}),
        slow(1, {"pp_size": 2}),
        slow(3, {"pp_size": 2}),
        slow(1, {"pp_size": 2, "schedule": "dualpipe_v"}),
        *(slow(layers, {"pp_size": 2, "schedule": "folded_1f1b"}) for layers in (1, 2, 3)),
        slow(2, {"pp_size": 2, "schedule": "1f1b"}),
        slow(3, {"pp_size": 2, "tp_size": 2}),
    ],
)
def test_frozen_lower_layers(layers: int, layout: dict[str, Any], like_stock: Callable[..., Any]) -> None:
    ranks = layout["pp_size"] * layout.get("tp_size", 1)
    helix = {"plan": "greedy", **layout}
    like_stock(ranks, helix, model={"num_hidden_layers": LAYERS}, training=TRAINING, freeze=lower(layers))


@pytest.mark.parametrize("schedule", ["auto", slow("dualpipe_v"), slow("folded_1f1b")])
@pytest.mark.parametrize("adapted", [[3], slow([2, 3])])
def test_adapters_in_the_last_layers(
    adapted: list[int], schedule: str, cluster_of: Callable[..., Any], stock: Callable[..., Any], tmp_path: Path
) -> None:
    lora = {"layers_to_transform": adapted, "target_modules": ["q_proj", "down_proj"]}
    case = {"model": {"num_hidden_layers": LAYERS, "lora": lora}, "training": TRAINING}
    expected, folder = stock(jobs.train, **case)
    helix = {"plan": "greedy", "pp_size": 2, "schedule": schedule}
    for result in cluster_of(2).run(jobs.train, folder=str(tmp_path), helix=helix, **case):
        compare_runs(result, expected, 4)
    mine, theirs = (load_file(Path(each, "adapter_model.safetensors")) for each in (tmp_path, folder))
    assert mine.keys() == theirs.keys()
    assert len(mine) == 4 * len(adapted)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)
