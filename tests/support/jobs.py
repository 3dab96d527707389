"""What the processes of a `Cluster` run. Every function returns plain data."""

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from support.models import adapted, arguments, sequences, tiny
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.distributed import DistributedConfig

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile


def make_trainer(
    folder: str,
    helix: dict[str, Any] | None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    freeze: Sequence[str] = (),
    **options: Any,
) -> Trainer:
    """A HelixTrainer, or a stock one where `helix` is None. `freeze` names parameters that are not trained."""
    data = {"count": 60, **(data or {})}
    given = {
        "model": frozen(tiny(**(model or {})), freeze),
        "train_dataset": sequences(**data),
        "eval_dataset": sequences(**{**data, "count": 5, "seed": 9}),
        **options,
    }
    return build(folder, helix, training, **given)


def frozen(model: Any, names: Sequence[str]) -> Any:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def train(folder: str, helix: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Train, evaluate and save."""
    trainer = make_trainer(folder, helix, **options)
    trainer.train()  # not evaluated before: the stock Trainer then forgets to wrap the model in DDP
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs],
        "eval": trainer.evaluate()["eval_loss"],
        "steps": trainer.state.global_step,
        "flos": trainer.state.total_flos,
        "logs": logs,
    }
    trainer.save_model(folder)
    return result


def train_with_fsdp2(folder: str, weights: str, lora: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """As `train`, by the stock Trainer, of a model that Transformers spreads with FSDP2 (`fully_shard`) as it loads it.
    Adapters are not spread; the Trainer averages their gradients over the ranks."""
    model = AutoModelForCausalLM.from_pretrained(weights, distributed_config=DistributedConfig(fsdp_size=2))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.name_or_path = ""  # PEFT writes it into the adapters' configuration; ours is made, not loaded
    model = model if lora is None else adapted(model, **lora)
    with mock.patch(f"{__name__}.tiny", return_value=model):
        return train(folder, None, **options)


def save_plan(folder: str, helix: dict[str, Any], path: str) -> str:
    """Write the plan of a run to a file (rank 0) and return its text. The searched one goes by rough efforts."""
    trainer = make_trainer(folder, helix)
    if helix.get("plan") in ("search", "dhelix"):
        made, profile = trainer.plan, rough_profile(trainer.helix.runner.rank_units.layout)
        plan = make_plan(helix["plan"], profile, model=made.model, mesh=made.mesh)
        trainer.helix.session.runner = trainer.helix.runner.with_plan(plan)
    if trainer.is_world_process_zero():
        trainer.plan.save(path)
    torch.distributed.barrier()
    return trainer.plan.to_json()


def construct(folder: str, helix: dict[str, Any], **options: Any) -> str:
    """Only construct; for errors."""
    make_trainer(folder, helix, **options)
    return "constructed"


def save_untrained(
    folder: str, helix: dict[str, Any], model: dict[str, Any] | None = None, own_weights: bool = False, **options: Any
) -> None:
    """Save a model as it was before training. `own_weights`: ranks other than 0 start from other ones."""
    made = tiny(**(model or {}))
    if own_weights and int(os.environ["RANK"]) > 0:  # there may be no process group yet
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_()
    HelixTrainer(model=made, args=arguments(folder), helix_config=HelixConfig(**helix), **options).save_model()


# -- the Trainer's other services --------------------------------------------------------------------------------


def build(folder: str, helix: dict[str, Any] | None, training: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A HelixTrainer, or a stock one where `helix` is None, with whatever the Trainer takes."""
    common = {"args": arguments(folder, **(training or {})), **options}
    return Trainer(**common) if helix is None else HelixTrainer(**common, helix_config=HelixConfig(**helix))


def predict(
    folder: str, helix: dict[str, Any] | None, count: int, model: dict[str, Any] | None = None, **data: Any
) -> dict[str, Any]:
    """Logits, labels and metrics of a data set, by way of `predict` and of `evaluate`."""
    seen = []

    def metrics(result: Any) -> dict[str, float]:
        logits = torch.from_numpy(result.predictions)
        seen.append(result.label_ids.copy())
        return {"samples": len(logits), "mean": logits[result.label_ids != -100].mean().item()}

    dataset = sequences(count, seed=9, **data)
    trainer = build(folder, helix, model=tiny(**(model or {})), eval_dataset=dataset, compute_metrics=metrics)
    output = trainer.predict(dataset)
    evaluated = trainer.evaluate()
    drop = ("runtime", "_per_second", "preparation_time")
    return {
        "predictions": output.predictions,
        "label_ids": output.label_ids,
        "seen": seen,
        "predicted": {name: value for name, value in output.metrics.items() if not name.endswith(drop)},
        "evaluated": {name: value for name, value in evaluated.items() if not name.endswith(drop)},
    }


class Recorder(TrainerCallback):
    """Every event with the step it came in, and what it is called with."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, list[str]]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **given: Any) -> None:
            names = sorted(key for key, value in given.items() if value is not None and key != "data_collator")
            self.events.append((name, state.global_step, names))

        return note


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)
