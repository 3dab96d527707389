"""One rank of any layout in one process: real models, real operators, real c10d calls on torch's fake process group.

In:   a model family, sizes, and a rank.
Out:  windows that were run on `CudaStreams` over a `FakeCuda`.
Must hold: everything but streams, events and what other ranks would send is what a GPU runs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.fake_cuda import FakeCuda
from support.models import tiny
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_helix.config import HelixConfig
from hf_helix.engine.optimizer_shards import step_shards
from hf_helix.engine.synthetic import Workload
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.mesh import forget_meshes, mesh_of
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams.streams import CudaStreams

CPU = torch.device("cpu")
MICROBATCHES = 3


@contextlib.contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """This process as a rank of a group whose collectives move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        forget_meshes()
        dist.destroy_process_group()


@contextlib.contextmanager
def one_rank(
    cuda: FakeCuda,
    family: str = "llama",
    plan: str = "greedy",
    rank: int = 0,
    dp: int = 1,
    model: dict[str, Any] | None = None,
    microbatches: int = MICROBATCHES,
    inter_node_axes: tuple[str, ...] = (),
    autocast_dtype: torch.dtype | None = None,
    **options: Any,
) -> Iterator[tuple[Runner, list[MicroBatch]]]:
    """A rank's runner, and a window for it.

    Args:
        rank: which of them.
        dp: how many copies of the model there are.
        products: see `Workload`.
        inter_node_axes, options: see `HelixConfig`.
    """
    config = tiny(family, **{"num_hidden_layers": 2, **(model or {})}).config
    helix = HelixConfig(**{"schedule": "folded_1f1b", "inter_node_axes": inter_node_axes, **options})
    world = dp * helix.ranks_per_batch
    with fake_world(world, rank) if world > 1 else contextlib.nullcontext():
        mesh = mesh_of(helix, CPU)
        workload = Workload(config, helix, CPU, mesh, autocast_dtype)
        made = workload.runner
        made.executor.streams.close()
        profile, schedule = rough_profile(made.rank_units.layout), made.scheduler(microbatches)
        chosen = make_plan(plan, profile, model="m", mesh=helix.option_sizes, schedule=schedule, search_share=0.02)
        streams = CudaStreams(CPU, cuda)
        yield (
            Runner(
                made.rank_units,
                chosen,
                mesh,
                streams,
                made.scheduler,
                0,
                made.precision.autocast_dtype,
                made.precision.fused,
            ),
            workload.window(microbatches, batch=2, length=8),
        )


def train_windows(cuda: FakeCuda, **options: Any) -> Runner:
    """Two windows under a watch, each with a step of an optimizer behind it; `cuda.waits` is left as of the second.

    Args:
        options: see `one_rank`.
    """
    with one_rank(cuda, **options) as (runner, window):
        with plain_parameters():
            parameters = [parameter for parameter in runner.rank_units.own_rows if parameter.requires_grad]
            optimizer = torch.optim.AdamW(parameters, foreach=True)
            step_shards(optimizer, runner.rank_units, runner.executor.streams)
        with cuda.watch():
            for _ in range(2):
                cuda.waits.clear()
                runner.train_window(window)
                waits = cuda.waits.copy()
                optimizer.step()
                optimizer.zero_grad()
        cuda.waits = waits
    return runner
