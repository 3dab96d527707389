"""Towers of images in the doctor: their work and weights beside the stock model's, and the split of layers."""

import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.image_jobs import KINDS, model_of
from support.marks import slow
from torch.utils.flop_counter import FlopCounterMode

from hf_helix.doctor.amounts.records import MATMUL
from hf_helix.doctor.case import Case
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import even_counts, model_flops, simulate_step, usual_counts
from hf_helix.models.registry import family_of
from hf_helix.planning.timing.cluster import load_cluster
from hf_helix.planning.timing.sizes import Sizes

CLUSTER = load_cluster("h100x8")
LENGTH = 512
COUNTED = [slow(kind, when=kind != "Qwen2VL") for kind in KINDS if kind != "SmolVLM"]


class Saved:
    """A tensor that autograd saves for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def on_meta(kind: str, frozen: bool = False) -> Any:
    return model_of(kind, frozen).to("meta").train()


def case_of(simulated: SimulatedModel, **sizes: int) -> Case:
    return Case.of(Sizes(**sizes), 1, LENGTH, 8, image_share=simulated.image_share(LENGTH))


def products(counter: FlopCounterMode) -> int:
    """The operations of products of two matrices, which every kind of attention leaves alone."""
    counted = counter.get_flop_counts()["Global"]
    return sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.parametrize("kind", ["Llava", slow("Qwen2_5_VL")])  # pixels, and patches in a row
def test_the_work_of_the_stock_tower(kind: str) -> None:
    """Two images a row: the products of the stock model's `get_image_features`, and of its backward; a step with images
    takes longer than without."""
    model = on_meta(kind)
    plain, simulated = (SimulatedModel(model, CLUSTER, images_per_row=images) for images in (0, 2))
    cases = [(each.amounts(case_of(each)), case_of(each)) for each in (plain, simulated)]
    flops, seconds = zip(
        *((model_flops(*case)[0], simulate_step(*case, CLUSTER).seconds) for case in cases), strict=True
    )
    assert flops[1] > flops[0]
    assert seconds[1] > seconds[0]
    counted = cases[1][0].operators
    found = [
        sum(k.flops for k in counted["embedding", f"{part}.towers"].kernels if k.sort == MATMUL and k.sizes[0] == 1)
        for part in "FB"
    ]
    stock = model_of(kind)
    towers = family_of(stock).towers
    assert towers is not None
    given = {
        name: torch.randn(value.shape) if value.is_floating_point() else value
        for name, value in towers.sample(2).given.items()
    }
    with FlopCounterMode(display=False) as forward:
        features = stock.model.get_image_features(**given).pooler_output
    assert found[0] == products(forward)
    assert simulated.image_tokens == len(features[0])
    with FlopCounterMode(display=False) as backward:
        sum(each.sum() for each in features).backward()
    # The products with the first layer's input need no gradient of pixels in both.
    assert found[1] == products(backward)


@pytest.mark.parametrize("kind", COUNTED)
def test_patches_for_each_token(kind: str) -> None:
    """The names of configurations tell what the tower's code does."""
    model = on_meta(kind)
    towers, simulated = family_of(model).towers, SimulatedModel(model, CLUSTER)
    assert towers is not None
    pixels, patch = towers.sample(1).given["pixel_values"], model.config.vision_config.patch_size
    patch = patch if isinstance(patch, int) else patch[0]
    patches = len(pixels) if pixels.dim() == 2 else pixels.shape[-1] // patch * (pixels.shape[-2] // patch)
    trained = family_of(on_meta(kind, frozen=True)).towers
    assert trained is not None
    assert towers.work == pytest.approx(3 * trained.work)
    matrices = towers.work * simulated.image_tokens / patches
    assert matrices == pytest.approx(round(matrices)), (towers.work, simulated.image_tokens, patches)
    assert matrices < sum(parameter.numel() for parameter in towers.parameters)


def test_weights_and_memory() -> None:
    """The tower's weights are among those of the first stage; a trained tower keeps what the stock one saves for its
    backward, a frozen one the embeddings alone."""
    kept = []
    for frozen in (False, True):
        model = on_meta("PaliGemma", frozen)
        simulated = SimulatedModel(model, CLUSTER, images_per_row=4)
        amounts = simulated.amounts(replace(case_of(simulated, pp=2), dtype="fp32"))
        towers = family_of(model).towers
        assert towers is not None
        elements = sum(parameter.numel() for parameter in towers.parameters)
        held, table = amounts.weights["embedding"], model.get_input_embeddings().weight.numel()
        assert (held.trained, held.frozen) == ((table, elements) if frozen else (table + elements, 0))
        kept.append(amounts.operators["embedding", "F.towers"].delta)
        backward = amounts.operators.get(("embedding", "B.towers"))
        computed = backward is not None and any(
            k.flops for k in backward.kernels if k.sort == MATMUL and k.sizes[0] == 1
        )
        assert computed is not frozen
    stock, saved = model_of("PaliGemma"), weakref.WeakSet()
    pixels = torch.zeros(4, 3, 28, 28)

    def keep(tensor: torch.Tensor) -> Saved:
        saved.add(one := Saved(tensor))
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one.tensor):
        features = stock.model.get_image_features(pixels).pooler_output
    assert features is not None
    known = {tensor.untyped_storage().data_ptr() for tensor in (pixels, *stock.parameters())}
    storages = {(s := each.tensor.untyped_storage()).data_ptr(): s.nbytes() for each in saved}
    embeddings = LENGTH * stock.config.text_config.hidden_size * 4
    assert kept[1] <= embeddings
    wanted = sum(count for pointer, count in storages.items() if pointer not in known)
    assert kept[0] - embeddings == pytest.approx(wanted, rel=0.15)


def test_layers_leave_the_rank_of_the_tower() -> None:
    """Brute force over all counts of eight layers on the fold finds no lighter heaviest rank."""
    simulated = SimulatedModel(on_meta("Qwen3VL"), CLUSTER, 1)
    case = case_of(simulated, pp=2)
    amounts = simulated.amounts(case)
    cost = case.config.image_share * amounts.model.tower_cost
    assert cost > 0.5
    counts = usual_counts(amounts, case)
    assert sum(counts) == 8
    assert counts[0] >= 2, "features are added behind two layers"

    def heaviest(given: Any) -> float:
        return max(given[0] + given[3] + cost + amounts.model.head_cost, given[1] + given[2])

    every = [each for each in itertools.product(range(1, 9), repeat=4) if sum(each) == 8 and each[0] >= 2]
    assert heaviest(counts) == pytest.approx(min(map(heaviest, every)))
    text = usual_counts(amounts, Case.of(case.sizes, 1, LENGTH, 8))
    assert counts[1] + counts[2] > text[1] + text[2]
    cut = even_counts(amounts, case, CLUSTER)
    assert cut[1] + cut[2] >= text[1] + text[2]
    assert cut[0] >= 2


def test_towers_that_are_not_counted() -> None:
    simulated = SimulatedModel(on_meta("SmolVLM"), CLUSTER)
    assert "is not counted" in simulated.without_images
    assert simulated.image_share(LENGTH) == 0
    with pytest.raises(ValueError, match="tower of SmolVLMForConditionalGeneration is not counted"):
        SimulatedModel(on_meta("SmolVLM"), CLUSTER, 1)
    with pytest.raises(ValueError, match=r"--images_per_row 3: images of 256 tokens in rows of 512; give 2 or less"):
        SimulatedModel(on_meta("Qwen2_5_VL"), CLUSTER, 3).image_share(LENGTH)
