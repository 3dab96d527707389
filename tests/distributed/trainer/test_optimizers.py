"""Optimizers by what they read: elements, blocks, matrices. Losses against the stock Trainer, and resumed runs.

torchao, galore-torch, apollo-torch and torch-optimi are not among the packages of `make install`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import build
from support.marks import slow
from support.models import llama

STEPS, SAVED = 6, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_parameters": {"shard_parameters": True},
}
SHARDED = (("shard_optimizer", "tp2"), ("shard_parameters", "shard_optimizer"))
MATRICES = (("pp2", "pp2"), ("tp2", "shard_parameters"), ("shard_optimizer", "pp2"))
ELEMENTS = ("lion_32bit", "ademamix", "paged_adamw_32bit", "rmsprop_bnb_32bit")
BLOCKS = ("adamw_bnb_8bit", "lion_8bit", "ademamix_8bit", "paged_adamw_8bit", "rmsprop_bnb_8bit")
RATES = {"lion_32bit": 3e-4, "lion_8bit": 3e-4, "rmsprop_bnb_32bit": 3e-4, "rmsprop_bnb_8bit": 3e-4}
LOW_RANK = {"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=8, update_proj_gap=2, scale=1.0"}
OPTIONS: dict[str, dict[str, Any]] = {
    "galore_adamw": LOW_RANK,
    "galore_adafactor": LOW_RANK,
    "apollo_adamw": LOW_RANK | {"optim_args": "proj=random, rank=8, scale=1.0, scale_type=channel, update_proj_gap=2"},
}


def follow(
    folder: str, optim: str, helix: dict[str, Any] | None = None, resume: bool = False, width: int = 128
) -> list[float]:
    """Returns the logged losses, of the stock Trainer without `helix`. A class in `MADE` is the script's to make."""
    torch.manual_seed(0)
    rows = STEPS * [torch.randint(1, 131, (16,)) for _ in range(4)]
    sizes = {} if optim in MADE else {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": 132}
    model = llama(num_hidden_layers=4, **sizes)  # blocks are of 256 elements
    sharded = helix is not None and not ({"tp_size", "pp_size"} & helix.keys())
    training: dict[str, Any] = {"learning_rate": RATES.get(optim, 2e-3), "save_strategy": "steps", "save_steps": SAVED}
    training |= {"max_steps": STEPS, "logging_steps": 1, "lr_scheduler_type": "constant", **OPTIONS.get(optim, {})}
    training |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1 if sharded else 2}
    given: dict[str, Any] = {"model": model, "train_dataset": [{"input_ids": row, "labels": row} for row in rows]}
    if optim in LATER:
        given["optimizer_cls_and_kwargs"] = (MADE[optim], {"lr": 1e-2})
    elif optim in MADE:
        given["optimizers"] = (MADE[optim]([each for each in model.parameters() if each.dim() == 2], lr=3e-3), None)
    else:
        training["optim"] = optim
    trainer = build(folder, None if helix is None else {"plan": "greedy", **helix}, training, **given)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "layout", "other", "rel", "package"),
    [
        *((optim, "tp2", "pp2", 1e-4, "bitsandbytes") for optim in ELEMENTS),
        ("paged_adamw_32bit", "shard_parameters", "shard_optimizer", 1e-4, "bitsandbytes"),
        *((optim, "pp2", "tp2", 2e-3, "bitsandbytes") for optim in BLOCKS),
        *(("adamw_bnb_8bit", *layouts, 2e-3, "bitsandbytes") for layouts in SHARDED),
        # A state in 4 bits may be off by a tenth, so what another order of sums changes shows earlier.
        *((f"adamw_torch_{bits}bit", "pp2", "tp2", rel, "torchao") for bits, rel in ((8, 5e-3), (4, 1e-2))),
        ("adamw_torch_8bit", "shard_optimizer", "shard_parameters", 5e-3, "torchao"),
        # Matrices
        ("adafactor", "pp2", "pp2", 1e-4, "transformers"),
        *(("apollo_adamw", *layouts, 1e-4, "apollo_torch") for layouts in MATRICES),
        # Singular vectors magnify another order of sums.
        *(("galore_adafactor", *layouts, 1e-3, "galore_torch") for layouts in MATRICES),
        *(("galore_adamw", *layouts, 1e-3, "galore_torch") for layouts in MATRICES),
        *(("stable_adamw", *layouts, 1e-4, "optimi") for layouts in MATRICES),
    ],
)
def test_a_run_is_the_stock_trainers_and_goes_on(
    optim: str, layout: str, other: str, rel: float, package: str, cluster_of: Any, tmp_path: Path, stock: Any
) -> None:
    """Trains in a layout, resumes there with the same bits, and resumes in another layout within twice `rel`."""
    pytest.importorskip(package)
    job, cluster = {"folder": str(tmp_path), "optim": optim}, cluster_of(2)
    whole = cluster.run(follow, **job, helix=LAYOUTS[layout])
    again = cluster.run(follow, **job, helix=LAYOUTS[layout], resume=True)
    moved = cluster.run(follow, **job, helix=LAYOUTS[other], resume=True)
    expected = stock(follow, optim=optim)[0]
    assert expected[-1] < 0.97 * expected[0], "it learns, so states matter"
    for ranks, tolerance in ((whole, rel), (moved, 2 * rel)):
        for losses in ranks:
            assert losses == pytest.approx(expected, rel=tolerance)
    assert again == whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "shard_optimizer", "shard_parameters"])
@pytest.mark.parametrize(
    ("optim", "package"),
    [
        ("adamw_bnb_8bit", "bitsandbytes"),
        *((f"adamw_torch_{bits}bit", "torchao") for bits in (8, 4)),
    ],
)
def test_states_are_quantized_as_those_of_the_full_parameter(
    optim: str, package: str, layout: str, cluster_of: Any, tmp_path: Path
) -> None:
    """Full parameters have 4,096 elements or more, the parts of ranks fewer."""
    pytest.importorskip(package)
    expected = follow(str(tmp_path / "stock"), optim, width=64)
    job = {"folder": str(tmp_path / "helix"), "optim": optim, "width": 64}
    for losses in cluster_of(2).run(follow, **job, helix=LAYOUTS[layout]):
        assert losses == pytest.approx(expected, rel=1e-2 if "4bit" in optim else 5e-3)


class Signs(torch.optim.Optimizer):
    """A user's optimizer."""

    granularity = "element"

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.add_(mean / (mean.abs() + 1e-3), alpha=-group["lr"])


class Normed(Signs):
    """The same, called matrix-wise."""

    granularity = "matrix"


class Mistaken(Signs):
    """A word that is unknown."""

    granularity = "rows"


class Centered(torch.optim.AdamW):
    """AdamW after a change of gradients row by row, by a step of its own."""

    def step(self, closure: Any = None) -> Any:
        center(self)
        return super().step(closure)


class Noted(torch.optim.Adagrad):
    """States from the start, and entries that belong to no parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, initial_accumulator_value=0.01)
        self.state["names"] = ["a", "b"]
        self.state["mean"] = torch.zeros(3)


@torch.no_grad()
def center(optimizer: Any, *_: Any) -> None:
    """Centers the gradients of matrices, row by row."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.dim() == 2:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))


def centered_by_a_hook(parameters: Any, lr: float) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    optimizer.register_step_pre_hook(center)
    return optimizer


MADE: dict[str, Any] = {
    "Muon": torch.optim.Muon,
    "Signs": Signs,
    "Normed": Normed,
    "Mistaken": Mistaken,
    "Centered": Centered,
    "Noted": Noted,
    "hook": centered_by_a_hook,
}
LATER = ("Noted",)
"""Classes of which the trainer makes the optimizer, when the model is cut."""


@pytest.mark.parametrize(
    ("optim", "layout"),
    [
        slow("Muon", "pp2"),
        ("Signs", "tp2"),
        *(slow("Normed", layout) for layout in ("pp2", "tp2")),
        ("Noted", "pp2"),
        *(slow("Noted", layout) for layout in ("tp2", "shard_optimizer", "shard_parameters")),
        ("hook", "tp2"),
        *(slow("hook", layout) for layout in ("pp2", "shard_optimizer", "shard_parameters")),
    ],
)
def test_a_class_says_what_it_reads(optim: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    expected = follow(str(tmp_path / "stock"), optim)
    assert expected[-1] < 0.99 * expected[0]
    job = {"folder": str(tmp_path / "helix"), "optim": optim, "helix": LAYOUTS[layout]}
    whole = cluster_of(2).run(follow, **job)
    again = cluster_of(2).run(follow, **job, resume=True)
    for losses, resumed in zip(whole, again, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert resumed == losses


@pytest.mark.parametrize(
    ("optim", "layout", "words"),
    [
        ("Centered", "tp2", "(Centered, ...): its step is not the one of AdamW, so it may look at more than single"),
        ("Mistaken", "tp2", "Mistaken.granularity='rows' is unknown; use one of element, block, matrix, model"),
    ],
)
def test_what_cannot_be_right_is_refused(optim: str, layout: str, words: str, cluster_of: Any, tmp_path: Path) -> None:
    for failure in cluster_of(2).errors(follow, folder=str(tmp_path), optim=optim, helix=LAYOUTS[layout]):
        assert failure.kind == "ValueError"
        assert words in failure.message.splitlines()[0]
