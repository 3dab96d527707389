"""Optimizers that read whole matrices, in layouts that divide these: the stock Trainer's runs, resumed in any layout.

Muon iterates in bfloat16, which magnifies another order of sums: `exact` iterates in float64 instead.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.jobs import build
from support.marks import slow
from support.models import tiny
from torch import Tensor
from torch.optim import _muon as muon
from transformers import Adafactor, Trainer

from hf_helix.engine.matrix_steps import MatrixStep
from hf_helix.runtime.divided import plain_parameters

STEPS, SAVED = 6, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "dp2": {},
    "zero1": {"shard_optimizer": True},
    "zero3": {"shard_parameters": True},
    "zero1 on the host": {"shard_optimizer": True, "offload": "optimizer"},
    "tp2 on the host": {"tp_size": 2, "offload": "parameters"},
    "spread": {"pp_size": 2, "spread_vocabulary": True},
    "ep2": {"ep_size": 2},
    "ep2 zero3": {"ep_size": 2, "shard_parameters": True},
    "tp2 dp2": {"tp_size": 2},
    "tp2 zero1": {"tp_size": 2, "shard_optimizer": True},
    "tp2 zero3": {"tp_size": 2, "shard_parameters": True},
    "tp2 pp2": {"tp_size": 2, "pp_size": 2},
    "pp2 zero1": {"pp_size": 2, "shard_optimizer": True},
    "cp2 zero3": {"cp_size": 2, "shard_parameters": True},
    "copies": {"shard_parameters": True, "dp_replicate_size": 2},
}
FOUR = {"tp2 dp2", "tp2 zero1", "tp2 zero3", "tp2 pp2", "pp2 zero1", "cp2 zero3", "copies"}


def exact(grad: Tensor, ns_coefficients: Any, ns_steps: int, eps: float) -> Tensor:
    """Muon's iteration in float64."""
    a, b, c = ns_coefficients
    value = grad.double().T if grad.size(0) > grad.size(1) else grad.double()
    value = value / value.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = value @ value.T
        value = torch.addmm(value, torch.addmm(gram, gram, gram, beta=b, alpha=c), value, beta=a)
    return value.T if grad.size(0) > grad.size(1) else value


class Counted(torch.optim.Optimizer):
    """A user's optimizer, which counts its steps in its groups and in itself, and scales by the norm of a matrix."""

    granularity = "matrix"

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rate = group["lr"] / group["step"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.sub_(mean * (rate * parameter.norm() / (mean.norm() + 1e-3)))


class Broken(Counted):
    """Its third step fails in the middle."""

    granularity = "matrix"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.steps == 2:
            raise ArithmeticError("in the middle")
        super().step()


MADE: dict[str, Any] = {
    "muon": lambda model: torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=3e-3),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=1e-2, relative_step=False),
    "torch adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "counted": lambda model: Counted(model.parameters(), lr=1e-1),
    "broken": lambda model: Broken(model.parameters(), lr=1e-1),
}
MIXTURE = {"family": "mixtral", "num_hidden_layers": 4}


def follow(
    folder: str,
    optim: str,
    helix: dict[str, Any] | None = None,
    resume: bool = False,
    is_exact: bool = True,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains, or resumes, under the Trainer; of the stock Trainer without `helix`. Returns what it logs, the shapes of
    this rank's states, and the steps that the optimizer has counted."""
    given = made(folder, optim, helix, model, options)
    iteration = exact if is_exact else muon._zeropower_via_newtonschulz
    with mock.patch.object(muon, "_zeropower_via_newtonschulz", iteration):
        given.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    logs = [entry for entry in given.state.log_history if "loss" in entry]
    optimizer = getattr(given.optimizer, "optimizer", given.optimizer)
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "shapes": [
            tuple(each["momentum_buffer"].shape) for each in optimizer.state.values() if "momentum_buffer" in each
        ],
        "steps": getattr(optimizer, "steps", 0),
    }


def made(folder: str, optim: str, helix: dict[str, Any] | None, model: dict[str, Any] | None, options: Any) -> Trainer:
    whole = tiny(**{"num_hidden_layers": 4, **(model or {})})
    sizes = [(helix or {}).get(name, 1) for name in ("tp_size", "pp_size", "cp_size")]
    replicas = 1 if helix is None else torch.distributed.get_world_size() // (sizes[0] * sizes[1] * sizes[2])
    training = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": SAVED, "seed": 3}
    training |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // replicas, **options}
    torch.manual_seed(0)
    rows = STEPS * [torch.randint(1, 131, (16,)) for _ in range(8)]
    given: dict[str, Any] = {"train_dataset": [{"input_ids": row, "labels": row} for row in rows], "model": whole}
    given["optimizers"] = (MADE[optim](whole), None)
    return build(folder, None if helix is None else {"plan": "greedy", **helix}, training, **given)


def assert_alike(ranks: list[dict[str, Any]], expected: dict[str, Any], rel: float = 1e-5) -> None:
    for each in ranks:
        assert each["losses"] == pytest.approx(expected["losses"], rel=rel)
        assert each["norms"] == pytest.approx(expected["norms"], rel=rel)


@pytest.mark.parametrize(
    ("optim", "layout", "model"),
    [
        ("muon", "tp2", {}),
        ("adafactor", "zero3", {}),
        slow("counted", "tp2", {}),
        *(slow("muon", layout, {}) for layout in LAYOUTS if "ep2" not in layout and layout != "tp2"),
        *(slow("adafactor", layout, {}) for layout in ("tp2", "zero1 on the host", "tp2 pp2", "tp2 zero3", "copies")),
        *(slow("adafactor", layout, MIXTURE) for layout in ("tp2", "ep2", "ep2 zero3", "pp2 zero1")),
        *(slow("torch adafactor", layout, {}) for layout in ("tp2", "zero1", "tp2 zero3")),
        *(slow("counted", layout, {}) for layout in ("zero3", "tp2 dp2")),
        slow("counted", "ep2", MIXTURE),
    ],
)
def test_matrices_are_stepped_as_in_one_process(
    optim: str, layout: str, model: dict[str, Any], cluster_of: Any, tmp_path: Path, stock: Any
) -> None:
    """Also the part of a run that is resumed from a checkpoint of another layout."""
    expected = stock(follow, optim=optim, model=model)[0]
    assert expected["losses"][-1] < 0.998 * expected["losses"][0], "it learns, so states matter"
    job = {"folder": str(tmp_path), "optim": optim, "model": model}
    cluster = cluster_of(4 if layout in FOUR else 2)
    ranks = cluster.run(follow, **job, helix=LAYOUTS[layout])
    assert_alike(ranks, expected)
    assert {each["steps"] for each in ranks} == {expected["steps"]}
    others = {"tp2": "pp2", "tp2 dp2": "pp2 zero1", "ep2": "tp2"}
    moved = LAYOUTS[others.get(layout, "tp2 zero1" if layout in FOUR else "tp2")]
    assert_alike(cluster.run(follow, **job, helix=moved, resume=True), expected)


def test_a_run_goes_on_with_the_same_bits(cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "optim": "muon", "helix": LAYOUTS["zero1"], "is_exact": False}
    whole = cluster_of(2).run(follow, **job)
    again = cluster_of(2).run(follow, **job, resume=True)
    assert [each["losses"] for each in again] == [each["losses"] for each in whole]
    shapes = whole[0]["shapes"] + whole[1]["shapes"]
    assert len(shapes) == 4 * 7 + 2, "each matrix has its states on one rank"
    assert all(len(shape) == 2 for shape in shapes)
    assert min(len(each["shapes"]) for each in whole) > 8


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "zero3", "tp2 dp2"])
def test_muon_as_shipped_is_within_the_noise_of_its_iteration(
    layout: str, cluster_of: Any, tmp_path: Path, stock: Any
) -> None:
    expected = stock(follow, optim="muon", is_exact=False)[0]
    job = {"folder": str(tmp_path), "optim": "muon", "helix": LAYOUTS[layout], "is_exact": False}
    assert_alike(cluster_of(4 if layout in FOUR else 2).run(follow, **job), expected, rel=3e-3)


def step_that_fails(folder: str) -> list[Any]:
    """The shapes of this rank's parameters before the first step, and after a failed one; those of gradients then."""
    trainer = made(folder, "broken", {"tp_size": 2}, None, {"save_strategy": "no"})
    with plain_parameters():
        before = [tuple(each.shape) for each in trainer.model.parameters()]
    with pytest.raises(ArithmeticError):
        trainer.train()
    with plain_parameters():
        parameters = list(trainer.model.parameters())
        return [before, *([tuple(each.shape) for each in tensors] for tensors in (parameters, grads_of(parameters)))]


def grads_of(parameters: list[Any]) -> list[Any]:
    return [parameter.grad for parameter in parameters]


def test_parameters_are_parts_again_after_a_failed_step(cluster_of: Any, tmp_path: Path) -> None:
    for before, after, of_gradients in cluster_of(2).run(step_that_fails, folder=str(tmp_path)):
        assert before == after == of_gradients


def step_with_a_closure(folder: str) -> None:
    trainer = made(folder, "counted", {"tp_size": 2}, None, {"max_steps": 1, "save_strategy": "no"})
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert MatrixStep.of(optimizer) is not None
    optimizer.step(lambda: 0.0)


def test_a_closure_is_refused(cluster_of: Any, tmp_path: Path) -> None:
    words = ("step(closure) of Counted: it reads whole matrices", "call the closure, and then step()")
    cluster_of(2).assert_raises(step_with_a_closure, *words, folder=str(tmp_path))
