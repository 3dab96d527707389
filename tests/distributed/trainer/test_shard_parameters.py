"""`shard_parameters=True`: the run is that of stock data parallelism, under every plan, with a part of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.comparisons import compare_runs, compare_weights
from support.derived_models import HOME
from support.pipeline_jobs import make, runner_of, window_of
from support.tuning_jobs import hasty

from hf_helix.operators.weights.flat import Flat
from hf_helix.planning.graph.operator import Part

SHARDED = {"shard_parameters": True, "cache": False}
PLANS = ("sequential", "greedy", "round_robin", "search", "dhelix")
CLIPPED = {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
TIED = {"tie_word_embeddings": True}


# -- in the processes of a cluster ---------------------------------------------------------------------------------


def windows(
    folder: str, helix: dict[str, Any], model: dict[str, Any], plans: Sequence[str], training: dict[str, Any]
) -> dict[str, Any]:
    """A window without sharding, and the same with sharding under several plans.

    Returns:
        The losses; by plan, the shards of gradients that differ in their bits from the parts of the gradients without
        sharding, and by how much in parts of the norm; how many shards there are; what is wrong after a window.
    """
    whole = make(folder, {**helix, "plan": "sequential"}, model, training)
    whole.model.train()
    expected = [loss.item() for loss in whole.helix.runner.train_window(window_of(whole, 3, 2, (33, 16, 21)))]
    gradients = {name: parameter.grad for name, parameter in whole.model.named_parameters()}
    norm = whole.helix.gradient_norm().item()
    whole.helix.close()
    trainer = make(folder, {**helix, **SHARDED, "plan": "sequential"}, model, training)
    trainer.model.train()
    stage = trainer.helix.runner.stage
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    found: dict[str, Any] = {"expected": expected, "norm": norm, "plans": {}, "shards": len(stage.shards)}
    for plan in plans:
        with hasty():
            runner = runner_of(trainer, plan, "folded_1f1b")
        losses = [loss.item() for loss in runner.train_window(window_of(trainer, 3, 2, (33, 16, 21)))]
        differing, errors, bits = [], [0.0], {}
        for flat in stage.flats:
            for parameter, shard in flat.shards.items():
                name, (first, last) = names[parameter], flat.part(parameter)
                other = gradients[name]
                assert (shard.grad is None) == (other is None), name
                if shard.grad is None:
                    continue
                part = other.reshape(-1)[first:last]
                bits[name] = shard.grad.clone()
                differing += [] if torch.equal(shard.grad, part) else [name]
                distance = torch.linalg.vector_norm(shard.grad.double() - part.double())
                errors.append(float(distance / torch.linalg.vector_norm(other.double()).clamp_min(1e-30)))
        first_bits = found.setdefault("bits", bits)
        found["plans"][plan] = {
            "losses": losses,
            "differing": differing,
            "error": max(errors),
            "norm": trainer.helix.gradient_norm().item(),
            "unlike the first plan": [name for name, each in bits.items() if not torch.equal(each, first_bits[name])],
            "left": [names[p] for p in names if p.grad is not None or not p.isnan().all()],
        }
        trainer.model.zero_grad()
        assert all(shard.grad is None for shard in stage.shards.values())
    del found["bits"]
    trainer.helix.close()
    return found


def held(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The bytes that the parameters of this rank really take, and those of the whole model."""
    trainer = make(folder, {**helix, **SHARDED}, model)
    stage = trainer.helix.runner.stage
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in (*stage.placements, *stage.stepped)
    }
    flats = [(flat.length, flat.axis.size, len(flat.placements)) for flat in stage.flats]
    trainer.helix.close()
    return {"bytes": sum(storages.values()), "flats": flats}


def alive(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> int:
    """The most flats that are gathered at the same time in a window under `sequential`."""
    trainer = make(folder, {**helix, **SHARDED, "plan": "sequential"}, model)
    trainer.model.train()
    program = trainer.helix.runner.program(3)
    now = most = 0
    for instruction in program:
        op = instruction.operator
        if op is not None and op.part is not Part.W:
            now += sum(name.removeprefix("r.").startswith("weights") for _, name in instruction.writes)
        most = max(most, now)
        now -= sum(name.removeprefix("r.").startswith("weights") for _, name in instruction.frees)
    assert now == 0
    trainer.helix.close()
    return most


# -- in the tests --------------------------------------------------------------------------------------------------

WINDOWS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": (2, {}, {}, {}),
    "llama tied": (2, {}, TIED, {}),
    "llama recomputed": (2, {"recompute": "full"}, {}, {}),
    "llama with adapters": (2, {}, {"lora": {}}, {}),
    "llama bf16": (2, {}, {}, {"bf16": True}),
    "llama tp2": (4, {"tp_size": 2}, TIED, {}),
    "mixtral ep2": (4, {"ep_size": 2}, {"family": "mixtral"}, {}),
    "mixtral": (2, {}, {"family": "mixtral"}, {}),
    "gpt2 selective": (2, {"recompute": "selective"}, {"family": "gpt2"}, {}),
    "llama cp2": (2, {"cp_size": 2}, {}, {}),
    "llama pp2": (4, {"pp_size": 2}, {"num_hidden_layers": 4}, {}),
    "llama dp4": (4, {}, {}, {}),
    "gemma3": (2, {}, {"family": f"{HOME}gemma3"}, {}),
    "bf16 weights": (2, {}, {"dtype": "bfloat16"}, {}),
}
QUICK = ("llama", "llama tied", "llama recomputed", "llama tp2", "mixtral")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in WINDOWS]
)
def test_windows_are_those_of_whole_parameters(case: str, cluster_of: Any, tmp_path: Path) -> None:
    """The bits of all plans are the same; over two ranks they are those of the all-reduce of whole gradients."""
    ranks, helix, model, training = WINDOWS[case]
    layers = {"num_hidden_layers": 2, **model}
    plans = PLANS if case == "llama" else ("sequential", "greedy", "dhelix")
    found = cluster_of(ranks).run(
        windows, folder=str(tmp_path), helix={"cache": False, **helix}, model=layers, plans=plans, training=training
    )
    sizes = np.prod([size for name, size in helix.items() if name in ("tp_size", "pp_size")])
    for rank in found:
        assert rank["shards"] > 0
        for plan, result in rank["plans"].items():
            assert result["losses"] == rank["expected"], plan
            assert result["unlike the first plan"] == [], plan
            assert result["left"] == [], plan
            assert result["norm"] == pytest.approx(rank["norm"], rel=1e-5), plan
            if ranks // int(sizes) == 2:
                assert result["differing"] == [], plan
            assert result["error"] <= 1e-5, plan


TRAININGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "llama": (2, {}, {"training": CLIPPED}),
    "llama tied, decayed": (2, {}, {"model": TIED, "training": {**CLIPPED, "weight_decay": 0.1}}),
    "llama tp2": (4, {"tp_size": 2}, {"training": CLIPPED}),
    "mixtral": (2, {}, {"model": {"family": "mixtral"}, "training": CLIPPED}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama")) for name in TRAININGS]
)
def test_training_equals_stock_data_parallelism(case: str, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """Losses, norms, rates, evaluation and saved weights are those of the stock Trainer on two processes (DDP)."""
    ranks, helix, options = TRAININGS[case]
    expected, expected_folder = stock(jobs.train, dp=2, **options)
    helix = {**SHARDED, "plan": "greedy", **helix}
    for result in cluster_of(ranks).run("train", folder=str(tmp_path), helix=helix, **options):
        compare_runs(result, expected)
    compare_weights(str(tmp_path), expected_folder)


def test_a_rank_holds_its_part(cluster_of: Any, tmp_path: Path) -> None:
    """Parameters take 4 bytes an element of the padded flats, divided by the ranks, and one element a stand-in."""
    for rank in cluster_of(2).run(held, folder=str(tmp_path), helix={}, model={}):
        assert all(size == 2 for _, size, _ in rank["flats"])
        assert rank["bytes"] == sum(4 * (length // size + 1) for length, size, _ in rank["flats"])


def test_two_layers_are_whole_at_a_time(cluster_of: Any, tmp_path: Path) -> None:
    """Under `sequential`, a unit and the next one, in each of two strands: of the head, forward's are kept."""
    model = {"num_hidden_layers": 6}
    assert max(cluster_of(2).run(alive, folder=str(tmp_path), helix={}, model=model)) <= 5


REFUSED = {
    "states are not saved": ({}, {"save_strategy": "steps"}, "save_only_model=True"),
    "two shardings": ({"shard_optimizer": True}, {}, "shard_optimizer=False"),
    "graphs": ({"cuda_graphs": True}, {}, "cuda_graphs=False"),
    "tiles": ({"plan": "intra_batch"}, {}, "plan='auto'"),
    "optimizers of whole matrices": ({}, {"optim": "adafactor"}, "shard_parameters=True a rank holds only a part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused(case: str, cluster_of: Any, tmp_path: Path) -> None:
    helix, training, words = REFUSED[case]
    options = {"folder": str(tmp_path), "helix": {**SHARDED, **helix}, "training": training}
    for error in cluster_of(2).errors(jobs.construct, **options):
        assert error.kind == "ValueError"
        assert words in error.message


def test_a_flat_splits_alike_on_all_ranks() -> None:
    """Every element of every parameter belongs to one rank."""
    from hf_helix.operators.communication.transport import Axis, SilentTransport
    from hf_helix.operators.unit import COPIED

    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in ((7, 5), (3,), (64, 2), (1,))]
    seen = [torch.full((value.numel(),), torch.nan) for value in values]
    for rank in range(3):
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        axis = Axis(SilentTransport(3, rank))
        flat = Flat("weights", dict.fromkeys(parameters, COPIED), axis, axis)
        flat.spread(torch.device("cpu"))
        for place, parameter in enumerate(parameters):
            assert parameter.shape == values[place].shape
            assert parameter.isnan().all()
            if parameter in flat.shards:
                first, last = flat.part(parameter)
                assert seen[place][first:last].isnan().all()
                seen[place][first:last] = flat.shards[parameter].detach()
    for value, found in zip(values, seen, strict=True):
        assert torch.equal(found, value.reshape(-1))
