"""Foreign sizes: a layout in the words of Transformers or Accelerate: `DistributedConfig`, `ParallelismConfig`, the
YAML of `accelerate config`.

In:   such an object or block, and the options of a run.
Out:  the options with the same layout.
Must hold: what another library says keeps its meaning or is refused by name: sharded over `fsdp_size` or
`dp_shard_size` ranks, copied over `dp_replicate_size`, and the number of processes that it lays out. A size at odds
with a `HelixConfig` or another layout is an error that names both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from transformers.distributed.configuration_utils import DistributedConfig

from hf_helix.config import HelixConfig, nearest
from hf_helix.integrations.accelerate.layouts import launched_ranks

PREFIX = "parallelism_config_"  # of Accelerate's options in its YAML
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
SAYING_NO_LAYOUT = (
    *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable"),
    "sp_attn_implementation",
)

ForeignConfig = DistributedConfig | ParallelismConfig

_REFUSED = {
    "tp_plan": ((None, "auto"), "use None or 'auto': the model's own base_model_tp_plan counts"),
    "ep_plan": ((None,), "use None: experts are divided as the model's own plan says"),
    "fsdp_plan": ((None,), "use None: every layer is sharded by itself"),
    "fsdp_cpu_offload": ((False,), "use False, with shard_parameters and offload='parameters' in helix"),
    "fsdp_mixed_precision": ((False,), "use False, with TrainingArguments(bf16=True)"),
    "ep_implementation": (("auto", "all_to_all"), "use 'auto' or 'all_to_all'"),
    "sp_size": ((1,), "use sp_size=1, and cp_size for ranks that share a sequence"),
}
"""By a word of the other libraries: the values that are honoured, and a remedy for others."""


@dataclass(frozen=True)
class ForeignSizes:
    """The sizes of a layout that another library's configuration gives.

    Attributes:
        source: the configuration as a text, for errors.
        options: of `HelixConfig`.
        dp: how many data-parallel ranks it lays out; 0 if it gives no ranks.
        shard: its word for the ranks that shard.
    """

    source: str
    options: Mapping[str, Any]
    dp: int
    shard: str


def foreign_sizes_of(given: object) -> ForeignSizes | None:
    """Returns the layout of a configuration of another library; None for other objects. Raises ValueError for
    what cannot be honoured."""
    if isinstance(given, DistributedConfig):
        return _foreign_sizes(given, "fsdp_size", [each.name for each in fields(given)])
    if isinstance(given, ParallelismConfig):
        return _foreign_sizes(given, "dp_shard_size", SIZES)
    return None


def foreign_sizes_of_yaml(block: Mapping[str, Any], source: str) -> ForeignSizes | None:
    """Returns the layout of the block `parallelism_config` in a YAML of `accelerate config`; None if it has none.
    Raises ValueError for an unknown key or an impossible layout; names the file."""
    given = {str(key): value for key, value in block.items() if key != "helix"}
    known, usual = [PREFIX + name for name in (*SIZES, *SAYING_NO_LAYOUT)], {each.name for each in fields(HelixConfig)}
    for key in given:
        if key not in known:
            if key in usual:
                raise ValueError(
                    f"{source}: {key!r} stands in parallelism_config itself; it belongs one level deeper, in "
                    f"parallelism_config: helix: {key}: {given[key]}"
                )
            near = nearest(key, ["helix"]) or nearest(PREFIX + key.removeprefix(PREFIX), known)
            raise ValueError(
                f"{source}: parallelism_config: unknown key {key!r}{near}; known: helix, {', '.join(known)}"
            )
    sizes = {name: given[PREFIX + name] for name in SIZES if PREFIX + name in given}
    if not sizes:
        return None
    try:
        return foreign_sizes_of(ParallelismConfig(**sizes))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: parallelism_config: {error}") from error


def with_foreign_sizes(config: HelixConfig, foreign: ForeignSizes) -> HelixConfig:
    """Returns the options with a layout: each size from the side that gives one.

    Raises:
        ValueError: the two sides contradict each other, or the layout is for another number of processes.
    """
    if config.layouts is not None and foreign.dp:
        raise ValueError(
            f"{foreign.source} lays out one number of processes, and layouts={{{', '.join(map(str, config.layouts))}}} "
            "several; use one of them"
        )
    usual, new = HelixConfig(), {}
    for name, theirs in foreign.options.items():
        ours, default = getattr(config, name), getattr(usual, name)
        if theirs == default:
            continue
        if ours not in (default, theirs):
            raise ValueError(
                f"{foreign.source} says {name}={theirs}, and the helix options, or another layout, say {name}={ours}; "
                f"leave {name} out of one of them"
            )
        new[name] = theirs
    try:
        merged = replace(config, **new) if new else config
    except ValueError as error:
        raise ValueError(f"{foreign.source}: {error}") from error
    _check_processes(merged, foreign)
    return merged


def _foreign_sizes(given: Any, shard: str, words: Any) -> ForeignSizes:
    values = {name: getattr(given, name, None) for name in words}
    said = {name: value for name, value in values.items() if name.endswith("_size") and value not in (None, 1)}
    source = f"{type(given).__name__}({', '.join(f'{name}={value}' for name, value in said.items())})"
    problems = [
        f"{name}={values[name]!r}: {remedy}"
        for name, (honoured, remedy) in _REFUSED.items()
        if name in values and values[name] not in honoured
    ]
    if problems:
        raise ValueError(f"hf_helix cannot honour {source} with " + "\n  ".join(problems))
    tp, shards, copies = (said.get(name, 1) for name in ("tp_size", shard, "dp_replicate_size"))
    options = {name: said[name] for name in ("tp_size", "pp_size", "cp_size") if name in said}
    if "ep_size" in said:  # which counts the tensor-parallel ranks
        options["ep_size"] = said["ep_size"] // tp
    if shards > 1:
        options |= {"shard_parameters": True, "dp_replicate_size": copies}
    return ForeignSizes(source, options, shards * copies if said else 0, shard)


def _check_processes(config: HelixConfig, foreign: ForeignSizes) -> None:
    world = launched_ranks()
    left, rest = divmod(world, config.ranks_per_batch)
    if rest or foreign.dp in (0, left):  # a world that the sizes do not divide is an error of the mesh
        return
    raise ValueError(
        f"{foreign.source} has {foreign.dp} data-parallel rank{'s' * (foreign.dp > 1)}, and {world} processes, "
        f"{config.ranks_per_batch} for a batch, have {left}; use {foreign.shard} x dp_replicate_size = {left}, or a "
        f"HelixConfig, where data parallelism takes the rest; or start {foreign.dp * config.ranks_per_batch} processes"
    )
