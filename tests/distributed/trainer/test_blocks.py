"""Blocks that cannot be traced run as one operator: the run is that of stock data parallelism, whose ranks use other
experts, and other numbers of them; in other layouts it is that of the stock Trainer on one process.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import jobs
from support.block_models import HOME, NUM_EXPERTS, used_experts
from support.marks import slow
from support.models import tiny

LOOPED, BRANCHING = ({"family": f"{HOME}{name}", "num_hidden_layers": 4} for name in ("looped", "branching"))
SHORT = {"lengths": (5,), "count": 32}  # a rank has tokens for some experts only
TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}
ZERO1, ZERO3 = {"shard_optimizer": True}, {"shard_parameters": True}
MICROBATCH = {**ZERO3, "reduce_gradients": "microbatch"}
TWICE = {"gradient_accumulation_steps": 2}
LORA = {"target_modules": ["q_proj", "gate_proj", "down_proj"], "lora_dropout": 0.0}
NEVER = f"experts.{NUM_EXPERTS - 1}."


def follow(folder: str, helix: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Figures of a training, as of `support.jobs.train`, and the experts that this rank has used."""
    options = {"model": LOOPED, "data": SHORT, **options}
    helix = None if helix is None else {"plan": "greedy", "cache": False, **helix}
    trainer = jobs.make_trainer(folder, helix, **options)
    used_experts()
    trainer.train()
    used = used_experts()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    figures = {name: [float(entry[name]) for entry in logs] for name in ("loss", "grad_norm")}
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(folder)
    return {**figures, "eval": evaluated, "used": used}


def compare(ours: Path, stock: Path, found: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-5) -> None:
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=bound)
    np.testing.assert_allclose(found["grad_norm"], wanted["grad_norm"], rtol=10 * bound)
    np.testing.assert_allclose(found["eval"], wanted["eval"], rtol=0, atol=bound)
    (file,) = {"model.safetensors", "adapter_model.safetensors"} & {path.name for path in stock.iterdir()}
    saved, expected = load_file(ours / file), load_file(stock / file)
    assert saved.keys() == expected.keys()
    for name, weight in expected.items() if bound == 1e-5 else ():
        assert (saved[name] - weight).norm() <= 1e-4 * weight.norm(), name


def unused_as_before(folder: Path, model: dict[str, Any]) -> None:
    """The experts that no rank uses are as they were: without a gradient, the optimizer does not decay them."""
    before, after = tiny(**model).state_dict(), load_file(folder / "model.safetensors")
    names = [name for name in before if NEVER in name]
    assert names
    for name in names:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize(
    ("helix", "training"),
    [
        ({}, {}),
        slow(ZERO3, TWICE),
        slow(ZERO1, {}),
        slow({}, TWICE),
        slow(ZERO1, TWICE),
        slow(ZERO3, {}),
        slow(MICROBATCH, TWICE),
        slow({}, {"max_grad_norm": 0.1}),
    ],
    ids=str,
)
def test_ranks_with_other_experts(helix: Any, training: Any, cluster_of: Any, tmp_path: Path) -> None:
    """As DistributedDataParallel, which finds unused parameters: those of other ranks count as zeros."""
    ours, stock = tmp_path / "helix", tmp_path / "stock"
    wanted = cluster_of(2).run(follow, folder=str(stock), helix=None, training=training)
    found = cluster_of(2).run(follow, folder=str(ours), helix=helix, training=training)
    assert found[0]["used"] == wanted[0]["used"] != wanted[1]["used"] == found[1]["used"]
    compare(ours, stock, found[0], wanted[0])
    unused_as_before(ours, LOOPED)
    unused_as_before(stock, LOOPED)


@pytest.mark.parametrize("helix", [slow({}), ZERO1, slow(ZERO3), slow(MICROBATCH)], ids=str)
def test_ranks_with_other_branches(helix: Any, cluster_of: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "helix", tmp_path / "stock"
    options = {"model": BRANCHING, "training": {"per_device_train_batch_size": 1}}
    wanted = cluster_of(2).run(follow, folder=str(stock), helix=None, **options)[0]
    compare(ours, stock, cluster_of(2).run(follow, folder=str(ours), helix=helix, **options)[0], wanted)


RUNS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((layout, {"model": LOOPED}) for layout in (TP, PP, CP)),
    *((layout, {"model": BRANCHING}) for layout in (TP, PP)),
    (CP, {"data": {"lengths": (14,)}}),  # whose padding meets no expert
    (TP, {"data": {"lengths": (9, 5), "padding": "right"}}),
    *((layout, {"model": {**LOOPED, "lora": LORA}}) for layout in (TP, PP, CP)),
    *((layout, {"freeze": True}) for layout in (TP, PP)),
    *(({**layout, "recompute": "full"}, {}) for layout in (TP, PP)),
    *((layout, {"training": {"bf16": True, "learning_rate": 1e-4}}) for layout in (TP, PP)),
]


@pytest.mark.parametrize(
    ("helix", "options"), [slow(*run, when=run not in (RUNS[0], RUNS[3])) for run in RUNS], ids=str
)
def test_other_layouts(helix: Any, options: Any, cluster_of: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "helix", tmp_path / "stock"
    training = {**TWICE, **options.get("training", {})}
    options = {**options, "training": training}
    if options.pop("freeze", False):
        options["freeze"] = [name for name, _ in tiny(**LOOPED).named_parameters() if ".block." in name]
    wanted = follow(str(stock), None, **options)
    bound = 5e-3 if "bf16" in training else 1e-5
    for found in cluster_of(2).run(follow, folder=str(ours), helix=helix, **options):
        compare(ours, stock, found, wanted, bound)


@pytest.mark.slow
@pytest.mark.parametrize("helix", [{**TP, **ZERO3}, {**PP, **ZERO1}, {**TP, **PP}, {**CP, **ZERO3}], ids=str)
def test_four_ranks(helix: Any, cluster_of: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "helix", tmp_path / "stock"
    replicas = 4 // (helix.get("tp_size", 1) * helix.get("pp_size", 1) * helix.get("cp_size", 1))
    reference = cluster_of(2).run(follow, folder=str(stock), helix=None) if replicas > 1 else [follow(str(stock), None)]
    found = cluster_of(4).run(follow, folder=str(ours), helix=helix)
    compare(ours, stock, found[0], reference[0])


@pytest.mark.slow
@pytest.mark.parametrize("helix", [TP, PP], ids=str)
def test_dropout_draws_again_what_it_drew(helix: Any, cluster_of: Any, tmp_path: Path) -> None:
    """Recomputation draws the numbers of the forward pass, and so does another plan."""
    model, training = {**LOOPED, "expert_dropout": 0.3}, {**TWICE, "max_steps": 2}
    options = {"folder": str(tmp_path), "model": model, "training": training}
    first, *others = (
        cluster_of(2).run(follow, helix={**helix, **more}, **options)[0]
        for more in ({}, {"recompute": "full"}, {"plan": "sequential"})
    )
    for other in others:
        assert (other["loss"], other["grad_norm"]) == (first["loss"], first["grad_norm"])


def test_a_branch_over_a_shared_sequence_is_refused(cluster_of: Any, tmp_path: Path) -> None:
    words = "cp_size=2: mlp runs as one block, which does not work token by token", "use cp_size=1"
    cluster_of(2).assert_raises(follow, *words, folder=str(tmp_path), helix=CP, model=BRANCHING)


def resume(folder: str, helix: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of a training, and of one that goes on from its checkpoint in the middle."""
    training = {"save_strategy": "steps", "save_steps": 2}
    helix = {"plan": "greedy", "cache": False, **helix}
    found = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        trainer = jobs.make_trainer(folder, helix, LOOPED, SHORT, training)
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        trainer.helix.close()
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("helix", [{}, ZERO1, ZERO3, TP, PP], ids=str)
def test_resuming_without_states_of_unused_experts(helix: Any, cluster_of: Any, tmp_path: Path) -> None:
    """An optimizer has no states for experts that it never stepped; a checkpoint has none either."""
    for whole, resumed in cluster_of(2).run(resume, folder=str(tmp_path), helix=helix):
        assert resumed == whole
