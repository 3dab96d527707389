"""PEFT models on several ranks, for a `Cluster`. Named "support.peft_jobs:function" there."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from support import pipeline_jobs
from support.jobs import frozen
from support.models import arguments, sequences, tiny
from transformers import Trainer

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.planning.graph.operator import Part
from hf_helix.runtime.divided import plain_parameters


@plain_parameters()
def parts(folder: str, helix: dict[str, Any], model: dict[str, Any], freeze: tuple[str, ...] = ()) -> dict[str, Any]:
    """The weight gradients in this rank's graphs, and the bytes of gradients that a window leaves."""
    made = frozen(tiny(**model), freeze)
    trainer = HelixTrainer(model=made, args=arguments(folder), helix_config=HelixConfig(cache=False, **helix))
    made.train()
    trainer.helix.runner.train_window(pipeline_jobs.window_of(trainer, 2, 2, (9,)))
    stage = trainer.helix.runner.stage
    return {
        "weights": {
            unit.label: [op.forward_name for op in unit.graphs.backward.operators if op.part is Part.W]
            for unit in stage.units.values()
        },
        "names": {unit.label: unit.name for unit in stage.units.values()},
        "gradients": sum(p.grad.nbytes for p in stage.placements if p.grad is not None),
        "trained": sum(p.nbytes for p in stage.placements if p.requires_grad),
        "held": sum(p.nbytes for p in stage.placements),
    }


def go_on(folder: str, helix: dict[str, Any] | None, source: str, model: dict[str, Any]) -> list[float]:
    """Load saved adapters, train a little more on other data, save; the losses."""
    common: dict[str, Any] = {
        "model": PeftModel.from_pretrained(tiny(**model), source, is_trainable=True),
        "args": arguments(folder, max_steps=3, gradient_accumulation_steps=2),
        "train_dataset": sequences(20, seed=7),
    }
    trainer = Trainer(**common) if helix is None else HelixTrainer(**common, helix_config=HelixConfig(**helix))
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def fine_tune(folder: str, tokenizer: str, helix: dict[str, Any] | None, **training: Any) -> dict[str, Any]:
    """As `sft_jobs.train`, with adapters."""
    from support import sft_jobs  # TRL takes seconds to import

    sizes = {"num_hidden_layers": 4, "vocab_size": sft_jobs.VOCABULARY, "max_position_embeddings": 512}
    return sft_jobs.train(folder, tokenizer, helix, kind="completions", training=training, model=tiny(lora={}, **sizes))


def resume(folder: str, helix: dict[str, Any], model: dict[str, Any], source: str = "") -> list[float]:
    """Train four steps, with checkpoints; from a checkpoint where one is given. The losses."""
    args = arguments(folder, max_steps=4, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
    common: dict[str, Any] = {"args": args, "train_dataset": sequences(40), "helix_config": HelixConfig(**helix)}
    trainer = HelixTrainer(model=tiny(**model), **common)
    trainer.train(resume_from_checkpoint=source or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def load_into(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> None:
    """Load saved adapters into a cut model."""
    HelixTrainer(model=tiny(**model), args=arguments(folder), helix_config=HelixConfig(**helix)).helix.load_weights(
        folder
    )


def evaluations(folder: str, helix: dict[str, Any] | None, model: dict[str, Any], **training: Any) -> dict[str, float]:
    """Losses with the adapters that are trained, without adapters, with the idle one if there is one, and as first."""
    common: dict[str, Any] = {"args": arguments(folder, **training), "eval_dataset": sequences(4)}
    common |= {"model": tiny(**model)}
    trainer: Any = Trainer(**common) if helix is None else HelixTrainer(**common, helix_config=HelixConfig(**helix))
    result = {"trained": trainer.evaluate()["eval_loss"]}
    with trainer.model.disable_adapter():
        result["none"] = trainer.evaluate()["eval_loss"]
    if idle := model["lora"].get("idle"):
        trainer.model.set_adapter(idle)
        result["idle"] = trainer.evaluate()["eval_loss"]
        trainer.model.set_adapter("default")
    return result | {"again": trainer.evaluate()["eval_loss"]}


def train_the_idle_one(folder: str, helix: dict[str, Any], model: dict[str, Any], **training: Any) -> list[float]:
    """Losses of a run that trains the adapter which was idle when the model was cut; of an evaluation behind it."""
    args = arguments(folder, max_steps=3, **training)
    common: dict[str, Any] = {"args": args, "train_dataset": sequences(20), "eval_dataset": sequences(4)}
    trainer = HelixTrainer(model=tiny(**model), **common, helix_config=HelixConfig(**helix))
    trainer.model.set_adapter(model["lora"]["idle"])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]
