"""Synthetic workloads: a model with random weights and random tokens, for measuring without training.

In:   a Transformers configuration, a `HelixConfig`, and the sizes of a micro-batch.
Out:  a runner whose weights are cut, and windows of micro-batches.
Must hold: the same units, cuts and side inputs as in training; the same weights and tokens on every rank of a group.
"""

import warnings
from os import PathLike
from typing import Any

import torch

from hf_helix.config import HelixConfig
from hf_helix.engine.cut.build import RunOptions, cut_units, start_runner
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker
from hf_helix.engine.cut.recompute import modes_of
from hf_helix.models.new_adapters import import_peft
from hf_helix.models.registry import family_for
from hf_helix.models.stock.causal_lm import build_language_model, read_config
from hf_helix.runtime.distributed.mesh import Mesh, mesh_of
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.tuning.cache import fingerprint


def model_on_meta(model_config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model on the meta device in training mode, of a Transformers configuration or its path."""
    if isinstance(model_config, (str, PathLike)):
        model_config = read_config(model_config)
    try:
        with torch.device("meta"):
            return build_language_model(model_config, dtype=dtype).train()
    except ValueError:
        raise
    except Exception as error:  # of the class: sizes that do not fit, or a package that is missing
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"no model can be made of the {type(model_config).__name__} ({reason})") from error


def adapted_on_meta(model_config: Any, rank: int, target_modules: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model with LoRA adapters in fp32, on the meta device in training mode.

    Raises:
        ValueError: PEFT is not installed, or the model has no modules of these names.
    """
    peft = import_peft()
    names = target_modules.split(",")
    targets = names if len(names) > 1 else target_modules
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT's calls of Transformers
        config = peft.LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM")
        return peft.get_peft_model(model_on_meta(model_config, dtype), config).train()


class Workload:
    """A runner under the plan `sequential`, and windows for it.

    Args:
        model_config: the Transformers configuration of the model, or its path.
        config: the options of the cut; its `plan` is not read.
        device: the device to run on.
        mesh: a mesh of the sizes in `config`; None to build it.
        autocast_dtype: the type of matrix products under autocast; None for no autocast. Weights are fp32.

    Attributes:
        model: the Transformers model, cut.
        mesh: the mesh of ranks.
        runner: runs windows on this rank.
        about: the case of measurements, see `hf_helix.tuning.cache`.
    """

    def __init__(
        self,
        model_config: Any,
        config: HelixConfig,
        device: torch.device,
        mesh: Mesh | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model_on_meta(model_config)
        self.mesh = mesh or mesh_of(config, device)
        modes = modes_of(family_for(self.model, config.tp_size).layers(self.model), None, config)
        self.about = fingerprint(self.model, self.mesh, config, autocast_dtype, modes)
        self._maker = WindowMaker(self.model, self.mesh)
        cut = cut_units(self.model, config, self.mesh, modes, autocast_dtype=autocast_dtype)
        options = RunOptions(autocast_dtype=autocast_dtype)
        self.runner = start_runner(self.model, cut.rank_units, config, self.mesh, options)

    def window(self, count: int, batch: int, length: int) -> list[MicroBatch]:
        """Returns `count` micro-batches of random tokens [batch, length]."""
        generator = torch.Generator().manual_seed(1)
        scale = LossScale(torch.tensor(1.0 / (count * batch * max(1, length - 1)), device=self.mesh.device))
        vocabulary, device = self.model.config.get_text_config().vocab_size, self.mesh.device
        window = []
        for place in range(count):
            ids = torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)
            window.append(self._maker.microbatch({"input_ids": ids, "labels": ids}, scale, (0, place)))
        return window
