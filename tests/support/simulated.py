"""Clusters, cases and small models for what is simulated: on the meta device, in this process."""

from dataclasses import replace
from typing import Any

import torch
from support.units import StandInGroup
from transformers import AutoConfig

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.amounts import simulated_mesh
from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.counting import Kinds, amounts_of
from hf_helix.engine.cut.build import cut_units
from hf_helix.engine.synthetic import model_on_meta
from hf_helix.planning.timing.cluster import Cluster, parse_cluster
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.planning.window.layout import Layout
from hf_helix.runtime.distributed.mesh import Mesh, mesh_of

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


def on_meta(model_type: str = "llama", **options: Any) -> Any:
    """A model of random weights that take no memory; small, as `LLAMA` is, but for the options."""
    return model_on_meta(AutoConfig.for_model(model_type, **{**LLAMA, **options}))


def counted(
    model: Any,
    batch: int = 2,
    length: int = 32,
    bf16: bool = False,
    kinds: Kinds | None = None,
    dp_size: int = 1,
    **helix: Any,
) -> Amounts:
    """What a rank does for a micro-batch of a model, on a layout of these options of `HelixConfig`."""
    dtype = torch.bfloat16 if bf16 else None
    return amounts_of(model, HelixConfig(**helix), batch, length, dtype, kinds=kinds, dp_size=dp_size)


def mesh_of_replicas(ranks: int, config: HelixConfig, **how: Any) -> Mesh:
    """The mesh of the first of data-parallel ranks, which sends nothing; `how` as for `simulated_mesh`."""
    spread = {"copies": ranks, "expert_copies": ranks} if config.zero_stage else None
    mesh = simulated_mesh({"tp": config.tp_size}, spread=spread, **how)
    group: Any = StandInGroup(ranks)
    sizes = {**mesh.sizes, "dp": ranks}
    return replace(mesh, sizes=sizes, replica_group=group, expert_replica_group=group, dp_group=group)


def layout_of_training(model: Any, bf16: bool = False, **helix: Any) -> Layout:
    """What the runtime makes of a model on two data-parallel ranks, with these options of `HelixConfig`."""
    config = HelixConfig(**helix)
    mesh = mesh_of_replicas(2, config)
    if config.offload:
        alone = mesh_of(HelixConfig(offload=config.offload), "cpu")
        mesh = replace(mesh, host_link=alone.host_link)
        if not config.zero_stage:
            mesh = replace(mesh, replica_axes=alone.replica_axes, expert_replica_axes=alone.replica_axes)
    modes = ["none"] * model.config.num_hidden_layers
    return cut_units(model, config, mesh, modes, autocast_dtype=torch.bfloat16 if bf16 else None).rank_units.layout


def cluster_with(nodes: int = 1, devices_per_node: int = 8, **keys: Any) -> Cluster:
    """A cluster on which times can be worked out by hand: 100 TFLOP/s, 1000 GB/s, links of 100 and of 10 GB/s."""
    device = {"name": "X", "memory_gb": 80, "peak_tflops": {"bf16": 100, "fp32": 50}, "memory_gb_per_s": 1000}
    result = {
        "name": "by hand",
        "nodes": nodes,
        "devices_per_node": devices_per_node,
        "device": device | keys.pop("device", {}),
        "node": {"gb_per_s": 100},
        "network": {"gb_per_s": 10},
        **keys,
    }
    return parse_cluster(result, "by hand")


def case_of(microbatches: int = 8, batch: int = 1, length: int = 64, **options: Any) -> Case:
    """A case of `counted` amounts: sizes by their short names, and what else `Case.of` takes."""
    sizes = {name: options.pop(name) for name in ("tp", "cp", "pp", "dp", "ep") if name in options}
    return Case.of(Sizes(**sizes), batch, length, microbatches, **options)
