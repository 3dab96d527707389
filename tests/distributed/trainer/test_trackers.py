"""Trackers that upload the model have the files of `trainer.save_model`; those that watch modules are refused."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.jobs import build
from support.marks import slow
from support.models import adapted, llama, sequences
from transformers.integrations import DVCLiveCallback, WandbCallback

# -- stand-ins for packages that are not installed ---------------------------------------------------------------------


class Artifact:
    """An artifact of wandb, with the contents of its files."""

    def __init__(self, name: str, type: str, metadata: Any = None) -> None:
        self.name, self.files = name, {}  # type: ignore[var-annotated]

    @contextmanager
    def new_file(self, name: str, mode: str) -> Iterator[io.BytesIO]:
        yield (file := io.BytesIO())
        self.files[name] = file.getvalue()

    def add_dir(self, folder: str) -> None:
        self.files.update({path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()})


class Config(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool = False) -> None:  # type: ignore[override]
        super().update(values)


def wandb() -> Any:
    """A module in the place of wandb, whose `logged` are the artifacts by their last alias."""
    module: Any = ModuleType("wandb")
    module.logged = {}

    def log_artifact(artifact: Artifact, aliases: list[str]) -> None:
        module.logged[aliases[-1]] = artifact.files

    module.run = SimpleNamespace(id="1", name="run", url="", summary={}, log_artifact=log_artifact)
    module.run._label = lambda code: None
    module.config, module.summary, module.log_artifact, module.Artifact = Config(), {}, log_artifact, Artifact
    module.log = module.define_metric = lambda *args, **kwargs: None
    return module


def dvclive() -> Any:
    """A module in the place of dvclive, whose `logged` are the artifacts by their names."""
    module: Any = ModuleType("dvclive")
    module.logged = {}

    class Live:
        def log_params(self, values: Any) -> None:
            pass

        def next_step(self) -> None:
            pass

        def end(self) -> None:
            pass

        def log_artifact(self, folder: str, name: str, **kwargs: Any) -> None:
            artifact = Artifact(name, "model")
            artifact.add_dir(folder)
            module.logged[name] = artifact.files

    module.Live = Live
    return module


@contextmanager
def installed(name: str, variables: dict[str, str]) -> Iterator[Any]:
    """Puts a stand-in in its place, with its variables of the environment."""
    module = {"wandb": wandb, "dvclive": dvclive}[name]()
    utilities: Any = ModuleType(f"{name}.utils")
    utilities.standardize_metric_name = lambda name, framework: name
    plots: Any = ModuleType(f"{name}.plots")
    plots.Metric = SimpleNamespace(could_log=lambda value: False)
    errors: Any = ModuleType("config_util")
    errors.ConfigError = KeyError
    modules = {name: module, f"{name}.utils": utilities, f"{name}.plots": plots}
    modules |= {"wandb.sdk": ModuleType("sdk"), "wandb.sdk.lib": ModuleType("lib"), "wandb.sdk.lib.config_util": errors}
    there = f"transformers.integrations.integration_utils.is_{name}_available"
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch(there, return_value=True),
        mock.patch.dict("os.environ", variables),
    ):
        yield module


# -- what the ranks run ------------------------------------------------------------------------------------------------

CALLBACKS = {"wandb": WandbCallback, "dvclive": DVCLiveCallback}


def upload(
    folder: str, helix: dict[str, Any] | None, name: str, variables: dict[str, str], lora: bool = False
) -> dict[str, dict[str, bytes]]:
    """The files that a tracker has uploaded on this rank, and those of `save_model`."""
    small = llama(num_hidden_layers=4)
    model = adapted(small, target_modules=["q_proj"]) if lora else small
    training = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with installed(name, variables) as module:
        callbacks = [CALLBACKS[name]()]
        trainer = build(folder, helix, training, model=model, train_dataset=sequences(8), callbacks=callbacks)
        trainer.train()
        left = [path.name for path in Path(folder).glob("for_trackers*")]
        trainer.save_model(f"{folder}/saved")
        torch.distributed.barrier()
        saved = Artifact("saved", "model")
        saved.add_dir(f"{folder}/saved")
        assert left == []
        return {**module.logged, "saved": saved.files}


def watch(folder: str, helix: dict[str, Any]) -> None:
    with installed("wandb", {"WANDB_WATCH": "all"}):
        build(folder, helix, model=llama(), train_dataset=sequences(8), callbacks=[WandbCallback()])


# -- the tests ---------------------------------------------------------------------------------------------------------

END, CHECKPOINT, LIVE = {"WANDB_LOG_MODEL": "end"}, {"WANDB_LOG_MODEL": "checkpoint"}, {"HF_DVCLIVE_LOG_MODEL": "true"}


@pytest.mark.parametrize(
    ("name", "variables", "helix", "lora"),
    [
        ("wandb", CHECKPOINT, {"tp_size": 2}, False),
        slow("wandb", END, {"pp_size": 2}, False),
        slow("wandb", END, {"shard_parameters": True}, False),
        slow("wandb", END, {"tp_size": 2}, True),
        slow("dvclive", LIVE, {"tp_size": 2}, False),
    ],
    ids=str,
)
def test_uploads(
    name: str, variables: dict[str, str], helix: dict[str, Any], lora: bool, cluster_of: Any, tmp_path: Path
) -> None:
    first, second = cluster_of(2).run(
        upload, folder=str(tmp_path), helix=helix, name=name, variables=variables, lora=lora
    )
    assert second.keys() == {"saved"}
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    last = "last" if name == "dvclive" else "final_model"
    for alias in (last, *["checkpoint_global_step_2"] * (variables == CHECKPOINT)):
        assert first[alias][weights] == first["saved"][weights], alias
        assert "training_args.bin" in first[alias]
    assert load_file(tmp_path / "saved" / weights)


def test_watching_is_refused_by_the_variable(cluster_of: Any, tmp_path: Path) -> None:
    words = "WANDB_WATCH='all' in the environment: use WANDB_WATCH=false"
    cluster_of(2).assert_raises(watch, words, folder=str(tmp_path), helix={"tp_size": 2})
