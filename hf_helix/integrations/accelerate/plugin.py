"""The layout and the options in the form of Accelerate.

In:   a `HelixConfig`.
Out:  a `ParallelismConfig` for the stock `Accelerator` and `TrainingArguments`, and the mesh.
Must hold: Accelerate gives the ranks of a batch the same data and counts the data once, and wraps, shards and moves
nothing itself. Accelerate has no registry for plugins; a subclass of `ParallelismConfig` is the only entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hf_helix.config import HelixConfig
from hf_helix.integrations.accelerate.accelerator import counting_once
from hf_helix.integrations.accelerate.checks import check_accelerator
from hf_helix.integrations.accelerate.foreign_sizes import ForeignConfig
from hf_helix.integrations.accelerate.launcher import options_file, options_in, resolve_config
from hf_helix.integrations.accelerate.layouts import in_force, steps_of
from hf_helix.integrations.accelerate.loop import prepare
from hf_helix.integrations.upstream import check_class, overrides
from hf_helix.runtime.distributed.endings import is_launched
from hf_helix.runtime.distributed.environment import load_eagerly
from hf_helix.runtime.distributed.mesh import Mesh, check_joined, mesh_of
from hf_helix.runtime.failures.heartbeat import install_hook
from hf_helix.runtime.failures.restarts import separate_starts
from hf_helix.runtime.notices import say


def launch_options() -> HelixConfig | None:
    """Returns the options of the environment or the launcher's YAML; the environment and the YAML exist before CUDA
    starts."""
    try:
        given = options_in(options_file())
        return None if given is None else in_force(given)
    except (TypeError, ValueError):
        return None  # the first reader of the options raises the error


def _prepare_process() -> None:
    """Prepares the process before training arguments or the Accelerator make the process group and start CUDA.

    These objects are made before any call of hf_helix, so the preparation runs on import. All changes outside of
    hf_helix:
    `CUDA_DEVICE_MAX_CONNECTIONS`, a function of torch after a restart (see `separate_starts`), and in a launched
    process the exception hook, the loading of kernels, and a message of Accelerators.
    """
    separate_starts()
    if is_launched():
        install_hook()  # before the check of options, which may fail
        if (config := launch_options()) is not None:
            _tell_of_stock_accelerators()
            if config.pp_size > 1:
                load_eagerly()


def _tell_of_stock_accelerators() -> None:
    """Makes the first Accelerator, or stock Trainer, that ignores the options of the launch print a warning."""
    stock = Accelerator.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if not isinstance(self.parallelism_config, HelixPlugin):
            Accelerator.__init__ = stock
            say(
                "this launch has helix options, and an Accelerator or stock Trainer ignores them, so that each process "
                "trains on batches of its own, as with DDP: use HelixTrainer, a class with HelixTrainerMixin, or "
                "Accelerator(parallelism_config=HelixPlugin())"
            )

    Accelerator.__init__ = init


_prepare_process()


_ACCELERATOR = "accelerate.accelerator:Accelerator"


@check_class
class HelixPlugin(ParallelismConfig):
    """The layout for `TrainingArguments(parallelism_config=HelixPlugin(...))` or `Accelerator(parallelism_config=...)`.

    Args:
        config: the options, or keywords: `HelixPlugin(tp_size=2)`; or a layout as `DistributedConfig` of Transformers
            or `ParallelismConfig` of Accelerate. By default from the environment or the launcher's YAML (see
            `launcher`).

    Attributes:
        given: the options, perhaps with `layouts` for several numbers of ranks.
        config: the options of the present number of ranks.
    """

    def __init__(self, config: HelixConfig | ForeignConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise ValueError(f"give HelixPlugin a HelixConfig or keywords, not both; got {config} and {options}")
        self.given = HelixConfig.from_mapping(options, "HelixPlugin") if options else resolve_config(config, None)
        self.config = in_force(self.given)
        self.mesh: Mesh | None = None
        if self.config.pp_size > 1:
            load_eagerly()
        # To Accelerate, `tp_size` is the number of ranks that share a batch.
        super().__init__(
            dp_replicate_size=1,
            dp_shard_size=1,
            tp_size=self.config.ranks_per_batch,
            cp_size=1,
            cp_backend="torch",
            sp_size=1,
            sp_backend="deepspeed",
        )

    @property
    @overrides("ParallelismConfig", otherwise="Accelerate would look for DTensors", caller=_ACCELERATOR)
    def tp_enabled(self) -> bool:
        """False: Accelerate must not look for DTensor parameters."""
        return False

    @property
    @overrides("ParallelismConfig", otherwise="Accelerate would switch to FSDP", caller=_ACCELERATOR)
    def cp_enabled(self) -> bool:
        """False: Accelerate must not switch to FSDP."""
        return False

    def build_mesh(self, device: torch.device | str) -> Mesh:
        """Returns the mesh of this run, built on first use. Collective."""
        if self.mesh is None:
            config, device = self.config, torch.device(device)
            if device.type == "cuda" and device.index is None:  # Accelerate gives no index
                device = torch.device("cuda", torch.cuda.current_device())
            self.mesh = mesh_of(config, device)
        return self.mesh

    @overrides("ParallelismConfig", otherwise="ranks that share a batch would get different data")
    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Returns the dimensions by which Accelerate distributes batches."""
        return self.build_mesh(device_type).device_mesh

    @overrides(
        "ParallelismConfig",
        otherwise="ranks that share a batch would get different data",
        caller=_ACCELERATOR,
    )
    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Returns the dimensions by which Accelerate distributes batches; None if every rank gets its own batch.
        Without dimensions, the second call of the stock method fails.
        """
        if device_type is None:
            return self.mesh.device_mesh if self.mesh else None
        return self.build_device_mesh(device_type)

    def prepare(
        self,
        accelerator: Any,
        *objects: Any,
        seed: int | None = None,
        weights: str | Path | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Any:
        """Prepares objects as `accelerator.prepare` does, with the model cut over the ranks. Collective.

        Args:
            accelerator: made with this plugin, `Accelerator(parallelism_config=plugin, ...)`. Its mixed precision and
                `gradient_accumulation_steps` count; with `layouts`, these hold for the most ranks.
            objects: an ordinary Transformers model, and any number of new optimizers of its parameters, schedulers and
                data loaders.
            seed: of the randomness of the training (dropout, routers); None for torch's own seed (`set_seed`).
            weights: a checkpoint folder for a model on the meta device; None for random weights.
            loss: a loss of one's own, `loss(model, batch)`, which calls the model; a scalar. None for the next-token
                loss of the model.

        Returns:
            The objects in the order given: for the model, a `hf_helix.integrations.accelerate.loop.HelixModel`.

        Raises:
            ValueError: an option cannot be honoured; names the option and a value that works.
        """
        check_accelerator(accelerator, self, self.config.pp_size)
        self._follow(accelerator)
        mesh = self.build_mesh(accelerator.device)
        prepared = prepare(accelerator, objects, self.config, mesh, seed, weights, loss)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _follow(self, accelerator: Any) -> None:
        """Gives an Accelerator the micro-batches of a step on the present number of ranks, once."""
        if not getattr(accelerator, "follows_layouts", False):
            steps = steps_of(self.given, accelerator.gradient_accumulation_steps)
            accelerator.gradient_accumulation_steps, accelerator.follows_layouts = steps, True

    @overrides("ParallelismConfig", otherwise="logs would show Accelerate's fields instead", caller=None)
    def to_json(self) -> dict[str, Any]:
        """The options, for logs and trackers."""
        return {"helix": asdict(self.config)}

    def __repr__(self) -> str:
        return f"HelixPlugin({self.config})"

    def __getstate__(self) -> dict[str, Any]:
        """The state without process groups, for saved training arguments."""
        return {**self.__dict__, "mesh": None, "device_mesh": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> HelixPlugin:
        """The plugin itself: a copy of the arguments refers to the same groups."""
        return self

    @overrides(
        "ParallelismConfig",
        otherwise="Accelerate would refuse the layout by rules of its own",
        caller=_ACCELERATOR,
    )
    def _validate_accelerator(self, accelerator: Any) -> None:
        check_joined(accelerator.num_processes)
        counting_once(accelerator)


_LAYOUT = ("parallelism_config", "device_mesh")


def shared_layout() -> dict[str, Any]:
    """Returns the layout that all Accelerators of this process share."""
    return {name: AcceleratorState._shared_state.get(name) for name in _LAYOUT}


def keep_layout(accelerator: Any, plugin: HelixPlugin, shared: dict[str, Any]) -> None:
    """Gives the Accelerator of a trainer a layout of its own, beside the `shared_layout` of others, so that trainers of
    several layouts can live in a process."""
    counting_once(accelerator)
    accelerator.is_trainers = True
    own = plugin, plugin.build_device_mesh(accelerator.device)
    accelerator.state.__dict__ = {**accelerator.state.__dict__, **dict(zip(_LAYOUT, own, strict=True))}
    AcceleratorState._shared_state.update(shared)
