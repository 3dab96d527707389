"""Every option, with its checks.

In:   keyword arguments, a mapping, or a file.
Out:  a `HelixConfig`.
Must hold: nothing is silently ignored: an unknown key, a wrong type or an option that is not built is an error with the
name of the option and a value that works. Imports the standard library only (PyYAML to read a file).

A refusal belongs here if the value of an option is wrong for every model and every run. `hf_helix.engine.cut.checks`
refuses by model, `integrations/trainer/checks.py` and `integrations/accelerate/checks.py` the refusals of other
packages' options. Sources of options are listed in `integrations/accelerate/launcher.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from typing import Self


AUTO = "auto"
RULES = ("sequential", "round_robin", "dhelix", "greedy", "search")  # of planning.rules.registry
PLANS = (AUTO, *reversed(RULES))
INTRA_BATCH = "intra_batch"  # a rule of earlier versions
CP_METHODS = ("ring", "all_gather")
CP_RECURRENCES = ("heads", "states")
OPTIMIZER, PARAMETERS = "optimizer", "parameters"
OFFLOADS = (OPTIMIZER, PARAMETERS)
EVERY_MICROBATCH = "microbatch"
REDUCE_GRADIENTS = (AUTO, "window", EVERY_MICROBATCH)
FLOAT8 = ("tensorwise", "rowwise")
AXES = ("tp", "cp", "ep", "dp")
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = "offload"  # as "full", with what layers keep on the host
SCHEDULES = (AUTO, "folded_1f1b", "dualpipe_v", "1f1b")
CHOICES = {
    "cp_method": (CP_METHODS, ""),
    "cp_recurrence": (CP_RECURRENCES, ""),
    "reduce_gradients": (REDUCE_GRADIENTS, ""),
    "recompute": ((*RECOMPUTE, OFFLOAD), "to follow gradient_checkpointing"),
    "offload": (OFFLOADS, "to keep everything on the device"),
    "float8": (FLOAT8, "for products in the type of the run"),
}
"""Options with few values, and the meaning of None if None is one of them."""

OF_A_NODE = "--machine_rank RANK --main_process_ip HOST --main_process_port 29500"
"""The arguments of `accelerate launch` on each of several nodes, besides the configuration file that they share."""

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Of the environment of a torchrun that takes in nodes: ranks have a store of their own in every round."""

WITH_FEWER_NODES = (
    f"{OWN_STORE} HELIX_CONFIG_FILE={{file}} torchrun --nnodes {{nodes}} --nproc_per_node {{devices}} "
    "--max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 YOUR_SCRIPT.py"
)
"""The command of each node of a run with `layouts`; HOST is a node that stays."""

SIZES = ("tp_size", "pp_size", "cp_size", "ep_size")
NEEDED = {
    **{name: f"a whole number, such as {name}=1" for name in (*SIZES, "dp_replicate_size")},
    "verify_every": "a whole number, such as verify_every=100",
    **{name: f"a string, such as {name}='auto'" for name in ("plan", "schedule", "reduce_gradients")},
    **{
        name: f"true or false, such as {name}=True"
        for name in ("cache", "compile", "fused_kernels", "shard_optimizer", "shard_parameters", "spread_vocabulary")
    },
    "float8": "a string, such as float8='rowwise', true for 'tensorwise', or None",
    "cuda_graphs": "'auto', true or false, such as cuda_graphs='auto'",
    "tuning_share": "a number from 0 to 1, such as 0.05",
    "image_share": "a number from 0 to 1, such as 0.3",
    "layers_per_stage": "a list of whole or half numbers, such as [4, 4, 4, 4] or [4.5, 3.5, 4, 4]",
    "expert_capacity_factor": "a number, such as 1.25, or None",
    "offload": "a string, such as offload='optimizer', or None",
    "memory_gb": "a number of gigabytes, such as 22, or None",
}
"""What an option takes, for the error about a value that is not of its annotated type."""


@dataclass(frozen=True, kw_only=True)
class HelixConfig:
    """The cut of a model and the overlap of its communication.

    Data parallelism takes the rest of the processes: `dp = processes / (tp_size * pp_size * cp_size)`.

    Args:
        tp_size: ranks that share every layer (tensor and sequence parallelism).
        pp_size: ranks of the pipeline, each with layers of its own. By default it is folded: of 2 * pp_size stretches
            of layers (virtual stages), rank r holds r and 2 * pp_size - 1 - r, so embedding and head are on rank 0.
        cp_size: ranks that share a sequence (context parallelism): rank r holds the parts r and 2 * cp_size - 1 - r of
            2 * cp_size equal ones.
        ep_size: data-parallel ranks that share the experts of a mixture-of-experts model (expert parallelism). With
            tp_size above 1, the tensor-parallel ranks also share the experts: each holds one of ep_size * tp_size equal
            parts.
        expert_capacity_factor: the most tokens of an expert, relative to an equal share of all tokens; further tokens
            are dropped, and shapes never depend on the router. None to drop nothing, as Transformers does.
        plan: how the operators of two micro-batches are interleaved:
            `auto`: as soon as the run is long enough (see `tuning_share`), the operators are measured on micro-batches
            of the run, and the most promising of the plans below are timed; the fastest is kept, and named in a line
            of output. Until then, `greedy`;
            `search`: the searched plan, the fastest or not; measures before the first step;
            `greedy`: list scheduling of all micro-batches of a step (a window); measures nothing;
            `sequential`: one micro-batch at a time (Megatron's way);
            `dhelix`: the paper's paired segments with barriers (section 4.2), to compare with; measures before the
            first step;
            `round_robin`: operators in turn (the paper's Wavelet+), to compare with;
            or the path of a plan saved with `trainer.plan.save(path)` or made with `hf-helix plan`.
        tuning_share: the part of a run's time for measuring and searching under `plan="auto"`, from 0 to 1: after 2, 4,
            8, ... steps, the thoroughness is chosen to fit that part of the remaining steps (in a loop around
            Accelerate, without a known length, the number of steps so far is expected again). 1 measures before the
            first step, however short the run; 0 never measures, and takes only cached results.
        schedule: which micro-batch a pipeline rank takes when:
            `auto`: the fastest schedule on the fold that fits the memory (see `memory_gb`). Until operators are
            measured, the best of a few by the simulated time of equal layers; once `plan="auto"` measures,
            `folded_1f1b`, `dualpipe_v` and the best that a search finds for the measured times are timed in real steps.
            Layers never move between ranks, so `1f1b`, with another placement of layers, is not among the candidates;
            `folded_1f1b`: the paper's W schedule on the fold (section 4.1);
            `dualpipe_v`: DualPipeV on the fold, with weight gradients in the bubbles;
            `1f1b`: one forward, one backward, every rank with one stretch of layers (Megatron's way);
            or the path of a file with a line of actions for each rank, such as `0F0 1F0 (0F1;1B0)OVERLAP_F_B`.
        layers_per_stage: how many layers each virtual stage holds (2 * pp_size of them on the fold, pp_size with
            `1f1b`), in halves: 4.5 ends a stage between attention and MLP of its fifth layer. `hf-helix doctor`
            writes the counts that it predicts to be the fastest. None for whole layers, the work spread as evenly as
            they allow, embedding, head and loss included.
        image_share: the part of the tokens of a batch that are of images, such as 0.3: the split of layers over stages
            counts the work of the model's tower for them, on the first stage. 0.0 for batches of text. For
            layers_per_stage=None.
        spread_vocabulary: give every pipeline rank a slice of the embedding and of the head, by rows of the vocabulary,
            instead of all of both to one rank: that rank is otherwise the busiest, with large vocabularies or few
            layers. For schedule="auto"; `hf-helix doctor` predicts the faster way. See docs/layouts.md.
        shard_optimizer: shard the optimizer's step and its states over the data-parallel ranks (ZeRO-1). Every rank
            keeps all weights, with bf16 in bfloat16 if only products read the weights; gradients are reduced to the
            rank that steps the weights, and new weights are gathered concurrently with the next forward pass. See
            docs/data_parallelism.md.
        shard_parameters: shard the parameters, their gradients and the optimizer's states over the data-parallel ranks
            (ZeRO-3, FSDP): a layer's weights are gathered before it runs, concurrently with the computation of the two
            units before, and dropped after it. See docs/data_parallelism.md.
        reduce_gradients: with `shard_parameters`, when the data-parallel ranks reduce gradients to their shards:
            `window`: once in a window. The full gradients add up until then, in 4 bytes a parameter;
            `microbatch`: in every micro-batch: few full gradients exist at a time, and shards add up. Each
            micro-batch communicates as much as a window would. Accelerate calls this `sync_each_batch`;
            `auto`: in every micro-batch if full gradients would take more than a quarter of the device's memory (of
            `memory_gb`, if given), and once in a window otherwise. See docs/data_parallelism.md.
        dp_replicate_size: with `shard_parameters` or `shard_optimizer`, how many times the data-parallel ranks hold all
            shards (HSDP): gathers stay among the dp / dp_replicate_size ranks of a copy, which are neighbours, and only
            sums of a shard's gradients go from copy to copy. The number of hosts keeps gathers inside hosts. 1 for a
            single copy over all data-parallel ranks.
        offload: what lies in the memory of the host instead of the device's:
            `optimizer`: of the weights that this rank steps, the fp32 masters and the optimizer's states; the host's
            cores step them. The device keeps weights in the type of the products (bf16 with bf16=True) and, within a
            step, gradients; these are copied down during the backward pass, new weights up during the next forward
            pass. For optimizers that treat every element by itself. See docs/memory.md.
            `parameters`: besides, all weights, frozen ones included. A layer's weights are copied up before it runs,
            forward and backward, concurrently with the computation of the two units before, and dropped after it, as
            with `shard_parameters`; both together share the copies among the data-parallel ranks.
            None for nothing.
        recompute: operators that backward runs again, to keep fewer activations (activation checkpointing):
            `none`: nothing;
            `selective`: cheap operators: norms, rope, attention, activations, and the gathers before linears;
            `full`: of a layer's activations, only its input is kept;
            `offload`: as `full`, and between its forward and its backward pass that input lies on the host;
            None for `full` with `TrainingArguments(gradient_checkpointing=True)`, and else for `none`.
        cp_method: how keys and values reach the ranks that share a sequence: `ring`, step by step concurrently with the
            attention to keys that have arrived, or `all_gather`, all at once.
        cp_recurrence: what recurrent layers exchange between the ranks that share a sequence: `heads`, so that each
            rank has all tokens of its share of the heads, or `states`, of the parts of the sequence, whose size does
            not grow with the sequence (Gated DeltaNet and Kimi delta attention); see docs/layouts.md.
        inter_node_axes: the axes whose ranks are on different hosts (`tp`, `cp`, `ep`, `dp`): their communication runs
            on a separate stream. None to go by the hosts' names. Given in YAML as a list.
        profile: path of a profile made with `hf-helix profile`, to plan with instead of measuring.
        compile: compile the operators between matrix products, attention and communication (norms, ropes, activations,
            the loss) with `torch.compile`: fewer kernels on a GPU, at the price of compiling at the start. Results
            differ within the rounding of their type.
        cuda_graphs: run windows (optimizer steps without the optimizer) from CUDA graphs if their shapes repeat: the
            host then issues a window at once instead of operator by operator. A window's activations keep their memory
            meanwhile. Windows that cannot be captured run normally, with the reason in the output; see
            docs/cuda_graphs.md:
            `auto`: on CUDA, and nothing on CPUs; once a capture fails, all windows run operator by operator;
            `True`: the same, but a failed capture ends the run with an error;
            `False`: never.
        fused_kernels: run RMS norms, gated activations and ropes as one kernel each (Triton), on GPUs. The kernels were
            checked only on CPU, in Triton's interpreter; see docs/gpu.md.
        float8: multiply in 8-bit floating point (fp8) in forward, and for the input gradients, in all linears but the
            head and routers; on GPUs of compute capability 8.9 or more. Weight gradients stay in the type of the run,
            as do products of experts, weights in 4 bits, and linears with adapters or with sizes that 16 does not
            divide. With `tp_size`, all-gathers before these linears carry half the bytes of bf16. Not run on a GPU yet,
            emulated on CPUs; see docs/gpu.md:
            `tensorwise`: one scale for each matrix, and gradients in e5m2; the same as true;
            `rowwise`: one scale for each row, and gradients in e4m3: closer to bf16.
            None for products in the type of the run.
        verify_every: look for silent corruption: compute the gradients of every N-th window a second time, in another
            order, and compare them bit by bit before the optimizer steps. A difference ends the run with the names of
            rank and parameter. Costs a window in N, the memory of a second set of gradients, and CUDA graphs. 0 for
            never. Not for losses of one's own.
        memory_gb: gigabytes (1e9 bytes) of each device that a run may use: `schedule="auto"` takes no schedule whose
            activations, and weight gradients that are put off, exceed them. None for all of a GPU, and for no limit on
            CPUs.
        cache: keep measurements and chosen plans on disk, so that the next run of the same case starts at once; in
            `$HELIX_CACHE`, by default the folder `hf_helix` in Hugging Face's cache.
        link: emulate a link of this speed between the ranks (CPU only): "300mbit", "10gbit", "300mbit,1ms" with a
            latency, or "even": communication takes as long as computation; see docs/results.md.
        layouts: options by the number of ranks, for runs whose nodes come and go: {32: {"tp_size": 2}, 16: {"tp_size":
            2, "shard_optimizer": True}}. A run takes the options of its number, and the options next to `layouts` for
            all others. `per_device_train_batch_size` and `gradient_accumulation_steps` hold for the most ranks; with
            fewer, accumulation follows, so that a step keeps its samples. `train()` goes on from the newest whole
            checkpoint in `output_dir`, unless given another, or `resume_from_checkpoint=False`. None for one layout
            with any number of ranks. `hf-helix doctor --gpus 4x8,2x8 --write helix.yaml` writes them; see
            docs/checkpoints.md.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or an option that is not built yet.
    """

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    plan: str = "auto"
    tuning_share: float = 0.05
    schedule: str = AUTO
    profile: str | None = None
    compile: bool = False
    fused_kernels: bool = True
    cuda_graphs: bool | str = AUTO
    float8: bool | str | None = None
    memory_gb: float | None = None
    cache: bool = True
    layers_per_stage: tuple[float, ...] | None = None
    image_share: float = 0.0
    spread_vocabulary: bool = False
    shard_optimizer: bool = False
    shard_parameters: bool = False
    reduce_gradients: str = AUTO
    offload: str | None = None
    cp_method: str = "ring"
    cp_recurrence: str = "heads"
    expert_capacity_factor: float | None = None
    inter_node_axes: tuple[str, ...] | None = None
    recompute: str | None = None
    link: str | None = None
    dp_replicate_size: int = 1
    verify_every: int = 0
    layouts: Mapping[int, Mapping[str, Any]] | None = dataclasses.field(default=None, hash=False)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Names an unknown option and the nearest known option, like the YAML; Python would name only the unknown."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise TypeError(f"HelixConfig: unknown option {key!r}{nearest(key, known)}; known: {', '.join(known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("layers_per_stage", "inter_node_axes"):
            if isinstance(getattr(self, name), list):  # as YAML gives it
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.float8, bool):
            object.__setattr__(self, "float8", self.float8_recipe)
        for name, needed in NEEDED.items():
            value = getattr(self, name)
            if not _is_of(value, _KINDS[name]) or value == "":
                raise TypeError(f"{name} must be {needed}; got {value!r}")
        self._check_numbers()
        self._check_choices()
        self._check_sharding()
        if self.link is not None:
            parse_link(self.link)
        self._check_files()
        if self.layouts is not None:
            object.__setattr__(self, "layouts", _by_number(self.layouts))
            for world, config in self.by_world().items():
                _check_ranks(world, config)

    def by_world(self) -> dict[int, HelixConfig]:
        """Returns the options of every number of ranks in `layouts`, the most ranks first; empty without `layouts`."""
        return {world: self.for_world(world) for world in self.layouts or ()}

    def for_world(self, world: int) -> HelixConfig:
        """Returns the options for a number of ranks, without `layouts`.

        Raises:
            TypeError, ValueError: `layouts` has none for this number, or none that work.
        """
        if self.layouts is None:
            return self
        if world not in self.layouts:
            numbers = ", ".join(map(str, self.layouts))
            raise ValueError(
                f"layouts has no layout for {world} rank{'s' * (world > 1)}, only for {numbers}; add one, such as "
                f"layouts={{..., {world}: {{'tp_size': 1}}}}, or start as many processes as a layout has ranks"
            )
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return HelixConfig.from_mapping({**own, "layouts": None, **self.layouts[world]}, f"layouts: {world}")

    def _check_numbers(self) -> None:
        for name in (*SIZES, "dp_replicate_size"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, such as {name}=1; got {size}")
        if self.verify_every < 0:
            raise ValueError(f"verify_every={self.verify_every} is no number of windows; use 0 for never, or 100")
        if self.verify_every and self.cuda_graphs is True:
            raise ValueError(
                f"verify_every={self.verify_every} with cuda_graphs=True: gradients are computed in a second order, "
                "and a graph has one; use cuda_graphs=False"
            )
        share, factor = self.tuning_share, self.expert_capacity_factor
        if not 0 <= share <= 1:
            raise ValueError(f"tuning_share={share} is no part of a run's time; use a number from 0 to 1, such as 0.05")
        if not 0 <= self.image_share <= 1:
            raise ValueError(
                f"image_share={self.image_share} is no part of the tokens; use a number from 0 to 1, such as 0.3"
            )
        if self.memory_gb is not None and not self.memory_gb > 0:
            raise ValueError(f"memory_gb={self.memory_gb} is no memory of a device; use a number, such as memory_gb=22")
        if factor is not None and not factor >= 1:
            raise ValueError(
                f"expert_capacity_factor={factor} leaves less room than the chosen experts of all tokens need, however "
                "evenly they are chosen; use 1.0 or more, such as 1.25, or None to drop nothing"
            )

    def _check_choices(self) -> None:
        for name, (known, without) in CHOICES.items():
            given = getattr(self, name)
            if given not in known and not (without and given is None):
                raise ValueError(
                    f"{name}={given!r} is unknown; use one of {', '.join(known)}{nearest(str(given), known)}"
                    + (f", or None {without}" if without else "")
                )
        if self.recompute == OFFLOAD and self.cuda_graphs is True:
            raise ValueError(
                "recompute='offload' with cuda_graphs=True: layers' inputs lie elsewhere on the host in every window, "
                "and a graph copies them where they lay; use cuda_graphs=False"
            )
        if isinstance(self.cuda_graphs, str) and self.cuda_graphs != AUTO:
            raise ValueError(f"cuda_graphs={self.cuda_graphs!r} is unknown; use cuda_graphs='auto', true or false")
        axes = self.inter_node_axes
        if axes is not None and not isinstance(axes, tuple):
            raise TypeError(f"inter_node_axes must be a list, such as inter_node_axes=['cp'], or None; got {axes!r}")
        for axis in axes or ():
            if axis not in AXES:
                raise ValueError(f"inter_node_axes={axis!r} is no axis; use some of {', '.join(AXES)}")

    def _check_sharding(self) -> None:
        if self.spread_vocabulary and self.pp_size == 1:
            raise ValueError(
                "spread_vocabulary=True with pp_size=1: a single pipeline rank has all of the vocabulary; use "
                "spread_vocabulary=False, or pp_size=2 or more"
            )
        if self.dp_replicate_size > 1 and self.zero_stage == 0:
            raise ValueError(
                f"dp_replicate_size={self.dp_replicate_size} without shards: every data-parallel rank holds all of the "
                "model already; add shard_parameters=True or shard_optimizer=True, or use dp_replicate_size=1"
            )
        if self.offload and self.cuda_graphs is True:
            raise ValueError(
                f"offload={self.offload!r} with cuda_graphs=True: gradients lie elsewhere on the host in every window, "
                "and a graph copies them where they lay; use cuda_graphs=False"
            )
        if self.streams_weights and self.shard_optimizer:
            raise ValueError(
                "offload='parameters' with shard_optimizer=True: no device keeps weights to gather new ones into; "
                "use shard_parameters=True, or shard_optimizer=False"
            )
        if not self.shard_parameters:
            if self.reduce_gradients == EVERY_MICROBATCH:
                raise ValueError(
                    f"reduce_gradients={EVERY_MICROBATCH!r} without shard_parameters=True: no rank has shards in which "
                    "gradients add up; add shard_parameters=True, or use reduce_gradients='auto'"
                )
            return
        if self.shard_optimizer:
            raise ValueError(
                "shard_parameters=True with shard_optimizer=True: sharded parameters have sharded states already; use "
                "shard_optimizer=False"
            )

    def _check_files(self) -> None:
        if self.profile is not None and not (isinstance(self.profile, str) and os.path.isfile(self.profile)):
            raise ValueError(
                f"profile={self.profile!r} is not an existing file; make one with `hf-helix profile --output PATH`, or "
                "use profile=None: plan='auto' measures by itself"
            )
        if self.plan == INTRA_BATCH:
            raise ValueError(
                f"plan={INTRA_BATCH!r} has become a benchmark: `python -m benchmarks.paper --figure 11` simulates it, "
                f"and `python -m benchmarks.plans tp --tiles` runs it; use one of {', '.join(PLANS)}"
            )
        if self.plan not in PLANS and not os.path.isfile(self.plan):
            raise ValueError(
                f"plan={self.plan!r} is neither a rule nor an existing file; "
                f"rules: {', '.join(PLANS)}{nearest(self.plan, PLANS)}"
            )
        if self.schedule not in SCHEDULES and not os.path.isfile(self.schedule):
            raise ValueError(
                f"schedule={self.schedule!r} is neither a schedule nor an existing file of actions; "
                f"schedules: {', '.join(SCHEDULES)}{nearest(self.schedule, SCHEDULES)}"
            )

    @property
    def ranks_per_batch(self) -> int:
        """How many ranks work on the same batch."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def streams_weights(self) -> bool:
        """Whether every use of weights copies them from the host."""
        return self.offload == PARAMETERS

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO: 3 with `shard_parameters`, 1 with `shard_optimizer`, 0 with neither."""
        return 3 if self.shard_parameters else int(self.shard_optimizer)

    @property
    def float8_recipe(self) -> str | None:
        """The name of the scaling of products in fp8; None without."""
        return self.float8 if isinstance(self.float8, str) else FLOAT8[0] if self.float8 else None

    @property
    def option_sizes(self) -> dict[str, int]:
        """The sizes of the mesh by their options, as in plan files: context and expert parallelism only if used."""
        sizes = {"tp_size": self.tp_size, "pp_size": self.pp_size}
        return sizes | {name: size for name in ("cp_size", "ep_size") if (size := getattr(self, name)) > 1}

    @property
    def communicates(self) -> bool:
        """Whether operators communicate; sums of gradients aside."""
        return self.ranks_per_batch * self.ep_size > 1 or self.shard_parameters

    @classmethod
    def from_mapping(cls, options: object, source: str) -> HelixConfig:
        """Returns the configuration of a mapping, such as the helix block of a YAML; `source` is its origin, for
        errors: TypeError for a wrong type, ValueError for an unknown option or a value that cannot work."""
        if not isinstance(options, Mapping):
            raise TypeError(f"{source}: expected options such as 'tp_size: 2', got {options!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(
                    f"{source}: unknown option {key!r}{nearest(str(key), known)}; known: {', '.join(known)}"
                )
        try:
            return cls(**options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{source}: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path) -> HelixConfig:
        """Returns the configuration of a YAML or JSON file with options, at the top or under
        `parallelism_config: helix:`. Raises the errors of `from_mapping`, and ValueError for an unreadable file."""
        return cls.from_contents(read_yaml(path), str(path))

    @classmethod
    def from_contents(cls, options: Any, source: str) -> HelixConfig:
        """Returns the configuration in the contents of a file, see `from_file`; `source` is its path."""
        if not has_helix_block(options):
            return cls.from_mapping(options, source)
        beside = [key for key in options if key in {field.name for field in dataclasses.fields(cls)}]
        if beside:
            raise ValueError(
                f"{source}: {', '.join(beside)} stands beside the helix block; put every option into the block"
            )
        return cls.from_mapping(options["parallelism_config"]["helix"], source)


_KINDS = get_type_hints(HelixConfig)


def _by_number(layouts: Any) -> dict[int, dict[str, Any]]:
    """Returns `layouts` by their numbers of ranks, the most ranks first; JSON has numbers as text. Raises TypeError."""
    example = "such as layouts={4: {'tp_size': 2}, 2: {'tp_size': 2}}"
    if not isinstance(layouts, Mapping) or not layouts:
        raise TypeError(f"layouts must be options by numbers of ranks, {example}, or None; got {layouts!r}")
    found = {}
    for key, options in layouts.items():
        world = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not _is_of(world, int) or world < 1:
            raise TypeError(f"layouts: {key!r} is no number of ranks; use a whole number from 1 on, {example}")
        if not isinstance(options, Mapping) or "layouts" in options:
            raise TypeError(f"layouts: {world} must be options of one layout, {example}; got {options!r}")
        found[world] = dict(options)
    return dict(sorted(found.items(), reverse=True))


def _check_ranks(world: int, config: HelixConfig) -> None:
    """Raises ValueError for a layout that needs another number of ranks."""
    sizes = {name: size for name in (*SIZES, "dp_replicate_size") if (size := getattr(config, name)) > 1}
    if world % math.prod(sizes.values()):
        raise ValueError(
            f"layouts: {world}: {' x '.join(f'{name}={size}' for name, size in sizes.items())} must divide {world} "
            f"ranks; use sizes whose product divides {world}, such as {{'tp_size': {math.gcd(world, config.tp_size)}}}"
        )


def described_options() -> dict[str, str]:
    """Returns the text of every option in the docstring of `HelixConfig`; empty under `python -OO`."""
    arguments = inspect.cleandoc(HelixConfig.__doc__ or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    return dict(re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", arguments, re.MULTILINE))


def has_helix_block(options: Any) -> bool:
    """Whether a loaded YAML has a block `parallelism_config: helix:`."""
    block = options.get("parallelism_config") if isinstance(options, Mapping) else None
    return isinstance(block, Mapping) and "helix" in block


def read_yaml(path: str | Path) -> Any:
    """Returns the contents of a YAML file."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the configuration file {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"the configuration file {path} is not valid YAML: {error}") from error


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type; true and false are no numbers."""
    if isinstance(kind, UnionType):
        return any(_is_of(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(each, get_args(kind)[0]) for each in value)
    return isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))


def nearest(word: str, known: Collection[str]) -> str:
    """Returns a hint at the nearest known word, for the end of an error; "" if no word is near."""
    begins = [name for name in known if name.startswith(f"{word}_")]
    close = begins or difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# -- the speed of an emulated link: a text such as "300mbit" or "10gbit,50us" ----------------------------------------

EVEN = "even"
EXAMPLES = "'300mbit', '10gbit', '300mbit,1ms' or 'even'"

_RATES = {
    prefix + ending: bits
    for prefix, bits in (("k", 1e3), ("m", 1e6), ("g", 1e9))
    for ending in ("bit", "bps", "bit/s", "b/s", "be", "")
}  # "25 gbit", and the ways in which switches and tools write it: 25Gbps, 25GbE, 25G
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of an emulated link, each way: bits a second, and seconds until the first byte arrives. The rate None
    is measured, as the rate at which communication takes as long as computation."""

    rate: float | None
    latency: float = 0.0

    @property
    def text(self) -> str:
        """The text of this speed, as read by `parse_link`."""
        first = EVEN if self.rate is None else f"{self.rate / 1e6:.12g}mbit"
        return first + (f",{self.latency * 1e3:.12g}ms" if self.latency else "")

    def seconds(self, count: float) -> float:
        """The seconds that bytes are on their way."""
        return self.latency + (8 * count / self.rate if self.rate else 0.0)

    def __str__(self) -> str:
        late = f", {_amount(self.latency, (('ms', 1e-3), ('us', 1e-6)))}" if self.latency else ""
        return f"{EVEN if self.rate is None else format_rate(self.rate)}{late}"


def parse_link(text: str) -> LinkSpeed:
    """Returns the speed of `HelixConfig(link=...)`: a rate or "even", and after a comma perhaps a latency. Raises
    TypeError for anything but a text, ValueError for a text that is no speed."""
    if not isinstance(text, str):
        raise TypeError(f"link must be a speed as a string, such as {EXAMPLES}, or None; got {text!r}")
    first, comma, second = (part.strip().lower() for part in text.partition(","))
    rate = None if first == EVEN else _quantity(first, _RATES)
    latency = _quantity(second, _TIMES) if comma else 0.0
    if (rate is None and first != EVEN) or rate == 0 or latency is None:
        raise ValueError(
            f"link={text!r} is no speed of a link; give a rate in kbit, mbit or gbit a second, or 'even', and after a "
            f"comma perhaps a latency in us, ms or s, such as {EXAMPLES}"
        )
    return LinkSpeed(rate, latency)


def format_rate(rate: float) -> str:
    """Returns bits a second for people, for example "412 Mbit/s"."""
    return _amount(rate, (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)))


def _quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(f"{_NUMBER} ?({'|'.join(units)})", text)
    return float(f"{float(match[1]) * units[match[2]]:.12g}") if match else None


def _amount(value: float, units: tuple[tuple[str, float], ...]) -> str:
    name, unit = next((each for each in units if value >= each[1]), units[-1])
    return f"{value / unit:.3g} {name}" if value / unit < 1000 else f"{value / unit:,.0f} {name}"
