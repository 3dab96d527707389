"""A model with random weights and random tokens: for measuring, where no training is at hand.

In:   a Transformers configuration, the sizes of the mesh and of a micro-batch.
Out:  a runner whose weights are cut, and windows of micro-batches.
Must hold: the same units, cuts and side inputs as in training; the same weights and tokens on every rank of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_helix.checkpoint.random_weights import initialize_parameters
from hf_helix.config import AUTO
from hf_helix.engine.recompute import recompute_units
from hf_helix.models.builder import RING, Sharing
from hf_helix.models.registry import family_of
from hf_helix.models.sequence_sharding import SequenceCut
from hf_helix.planning.graph.recompute import NONE
from hf_helix.planning.pipeline.scheduler import Scheduler
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.profile import rough_profile
from hf_helix.runtime.distributed.mesh import Mesh, build_mesh
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.stage import place_units
from hf_helix.runtime.streams import make_streams
from hf_helix.tuning.tuner import describe


class Workload:
    """A runner and what to feed it.

    Args:
        config: of the model, or the folder of one.
        device: to run on.
        schedule, cp_method, cross_node, recompute, link: see `HelixConfig`.
        products: see `Runner`; weights are fp32.
        mesh: of these sizes, if there is one already.
    """

    def __init__(
        self,
        config: Any,
        tp_size: int,
        device: torch.device,
        pp_size: int = 1,
        schedule: str = AUTO,
        mesh: Mesh | None = None,
        cp_size: int = 1,
        cp_method: str = RING,
        ep_size: int = 1,
        capacity_factor: float | None = None,
        cross_node: Collection[str] | None = None,
        products: torch.dtype | None = None,
        recompute: str = NONE,
        link: str | None = None,
    ) -> None:
        if isinstance(config, str):
            config = AutoConfig.from_pretrained(config)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        self.mesh = mesh or build_mesh(tp_size, device, pp_size, cp_size, ep_size, cross_node, link)
        self._family = family_of(self.model)
        mesh = self.mesh
        modes = [recompute] * len(self._family.layers(self.model))
        self.about = describe(self.model, mesh, products, modes)
        sharing = Sharing(mesh.tp, mesh.cp, mesh.experts, cp_method, capacity_factor, device)
        units = recompute_units(self._family.units(self.model, sharing), modes)
        scheduler = Scheduler(schedule, pp_size)
        empty, head_cost = self._family.empty(self.model, tp_size), self._family.head_cost(self.model)
        stage = place_units(units, self.mesh.pipe, empty, scheduler.placement, head_cost)
        plan = make_plan(
            "sequential",
            rough_profile(stage.layout),
            model=type(self.model).__name__,
            mesh=self.mesh.option_sizes,
        )
        initialize_parameters(self.model, self._family.layers(self.model), stage, mesh, seed=0)
        self.runner = Runner(stage, plan, self.mesh, make_streams(device), scheduler, 0, products)

    def window(self, count: int, batch: int, length: int) -> list[MicroBatch]:
        """Micro-batches of `batch` sequences of `length` random tokens."""
        dice = torch.Generator().manual_seed(1)
        scale = torch.tensor(1.0 / (count * batch * max(1, length - 1)), device=self.mesh.device)
        cut = SequenceCut.of(self.mesh.tp, self.mesh.cp)
        made = []
        for place in range(count):
            ids = torch.randint(0, self.model.config.vocab_size, (batch, length), generator=dice).to(self.mesh.device)
            inputs = {"input_ids": ids, "labels": ids}
            prepare = functools.partial(self._family.side_inputs, self.model, inputs, cut, scale)
            made.append(MicroBatch(prepare, (0, place), ids.numel(), f"{batch} x {length}"))
        return made
