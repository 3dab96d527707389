"""hf-helix simulate: a step of a layout on a cluster, without the cluster.

In:   a model's configuration, a cluster file, the sizes of the mesh and of a micro-batch.
Out:  seconds of a step and of its parts, tokens a second, TFLOP/s, MFU, memory by part; a page if asked for.
Must hold: nothing is measured, and no process is started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, isinf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.cli.options import Command, config_option, configuration_file, length, option
from hf_helix.config import (
    AUTO,
    FLOAT8,
    OFFLOAD,
    OFFLOADS,
    RECOMPUTE,
    REDUCE_GRADIENTS,
    RULES,
    LinkSpeed,
    parse_link,
)
from hf_helix.planning.collection import without_collection
from hf_helix.planning.timing.cluster import Cluster, load_cluster
from hf_helix.planning.timing.sizes import Sizes

if TYPE_CHECKING:
    from hf_helix.doctor.amounts.kept import KeptAmounts
    from hf_helix.doctor.case import Case
    from hf_helix.doctor.simulated import SimulatedModel
    from hf_helix.doctor.step import Step

ALL = "all"


@dataclass(kw_only=True)
class OnCluster(Command):
    """A question about a model on a cluster: the options of `simulate` and `doctor`."""

    model: str = option(..., "a folder with a config.json, such a file, or a name on the Hugging Face Hub")
    cluster: str = option(..., "a YAML file, or the name of a cluster that hf_helix brings")
    gpus: str | None = option(
        None,
        "as many devices, in nodes like those of the cluster; or nodes x devices of a node, such as 2x4; or several, "
        "such as 4x8,2x8",
        several=",",
    )
    network: str | None = option(
        None,
        "another network: faster by a factor, such as x2 or x0.5, or a node's links, such as 10gbit, 10gbit,50us, "
        "8x400gbit or 8xndr; or several",
        several=" ",
    )
    sequence_length: int = option(
        4096, "tokens in a sequence, such as 8192 or 8k (8,000); or several", type=length, several=" "
    )
    images_per_row: int | None = option(
        None,
        "images in a row, for a model with a tower of images; 1 where its work can be counted. Images are square, of "
        "the tower's own size, or of 448 pixels",
    )
    imbalance: float = option(1.0, "rows of the busiest rank's experts in parts of the mean, such as 1.3")
    expert_capacity_factor: float | None = config_option("expert_capacity_factor")
    dtype: str = option("bf16", "the type of matrix products", choices=("bf16", "fp32"))
    float8: str | None = config_option("float8", default=None, choices=FLOAT8)
    state_bytes: float = option(
        8.0, "bytes of the optimizer's states for a trained element: 8 of AdamW, about 2 in 8 bits, 1 in 4 bits"
    )
    lora_r: int = option(
        0, "the rank of LoRA adapters on a frozen model loaded in --dtype; 0 to train the model itself"
    )
    target_modules: str = option("all-linear", "modules that get adapters, such as q_proj,v_proj")
    schedule: str = config_option("schedule")
    cuda_graphs: str = config_option("cuda_graphs", default=AUTO, choices=(AUTO, "true", "false"))
    html: Path | None = option(None, "also write a page for a browser: a window, its memory, the layouts; one file")

    def scaled_cluster(self) -> Cluster:
        """Returns the cluster of the file, with the devices and the network of the options."""
        cluster = load_cluster(self.cluster)
        if self.gpus is not None:
            cluster = _resized(cluster, self.gpus)
        return cluster if self.network is None else _linked(cluster, self.network)

    def simulated_model(self, cluster: Cluster, like: SimulatedModel | None = None) -> SimulatedModel:
        """Returns the model, with adapters if they are asked for. Raises ValueError if adapters cannot be made, or an
        option is about experts and the model has none.

        Args:
            cluster: the cluster.
            like: the same model on a cluster of such devices, whose counts serve again; None for none.
        """
        from hf_helix.doctor.simulated import SimulatedModel

        path, rank = configuration_file(self.model), self.lora_r
        if rank < 0:
            raise ValueError(
                f"--lora_r {rank}: give the rank of the adapters, such as 16, or 0 to train the model itself"
            )
        if (images := self.images_per_row) is not None and images < 0:
            raise ValueError(f"--images_per_row {images}: give 1 or more, or 0 for rows of text")

        def adapted() -> Any:
            import torch

            from hf_helix.doctor.counting import TYPES
            from hf_helix.engine.synthetic import adapted_on_meta

            return adapted_on_meta(path, rank, self.target_modules, TYPES[self.dtype] or torch.float32)

        adapters = {"lora_r": rank, "target_modules": self.target_modules, "dtype": self.dtype} if rank else {}
        simulated = like.on(cluster) if like is not None else None
        simulated = simulated or SimulatedModel(
            adapted if rank else path, cluster, images, kept_amounts(path, images, adapters)
        )
        if images and not simulated.image_tokens:
            raise ValueError(f"--images_per_row {images}: {simulated.name} has no tower of images; leave it out")
        simulated.check_length(self.sequence_length)
        capacity = self.expert_capacity_factor
        if capacity is not None and simulated.experts == 1:
            raise ValueError(f"--expert_capacity_factor {capacity:g}: {simulated.name} has no experts; leave it out")
        return simulated

    def case_of(self, sizes: Sizes, **options: Any) -> Case:
        """Returns the case of the options, with further ones, see `Case.of`."""
        from hf_helix.doctor.case import Case

        names = ("schedule", "dtype", "imbalance", "expert_capacity_factor", "state_bytes", "float8")
        given = {"batch": 1, "microbatches": 1, **{name: getattr(self, name) for name in names}, **options}
        given["cuda_graphs"] = {"true": True, "false": False}.get(self.cuda_graphs, self.cuda_graphs)
        return Case.of(sizes, length=self.sequence_length, **given)

    def images_lines(self, simulated: SimulatedModel) -> Iterator[str]:
        """Yields the assumptions about the images of a row, for a model with a tower."""
        if simulated.without_images:
            yield f"Rows have text alone here: {simulated.without_images}."
        elif share := simulated.image_share(self.sequence_length):
            count, tokens = simulated.images_per_row, round(share * self.sequence_length)
            images = "1 image" if count == 1 else f"{count} images"
            yield f"Every row has {images}, {tokens:,} of its {self.sequence_length:,} tokens (--images_per_row)."

    def write_page(self, simulated: SimulatedModel, cluster: Cluster, steps: Mapping[str, Step], table: str) -> None:
        """Writes the page of the fastest of some steps, by name, with their table; FSDP is no step of ours."""
        from hf_helix.doctor.page import layouts_part, step_parts
        from hf_helix.doctor.report import step_lines
        from hf_helix.report.page import Part, write_page

        assert self.html is not None
        best = next(iter(steps.values()))
        card = Part("The scorecard", "Predicted, from the rates of the cluster.", "\n".join(step_lines(best, cluster)))
        drawn = step_parts(simulated.amounts(best.case), best.case, cluster)
        write_page(
            self.html, f"{simulated.name} on {cluster.name}", [card, layouts_part(steps, cluster, table), *drawn]
        )
        print(f"a page of it: {self.html}")

    def check_values(self) -> None:
        """Also raises ValueError if experts would get less than the mean, both options set the rows of experts, or
        states would take less than nothing."""
        super().check_values()
        imbalance, capacity = self.imbalance, self.expert_capacity_factor
        if not 1 <= imbalance < inf:
            raise ValueError(f"--imbalance {imbalance:g}: give 1 or more, such as 1.3 for 1.3 times the mean")
        if capacity is not None and not 1 <= capacity < inf:
            raise ValueError(f"--expert_capacity_factor {capacity:g}: give 1 or more, such as 1.25, or leave it out")
        if capacity is not None and imbalance > 1:
            raise ValueError(
                f"--imbalance {imbalance:g}: with --expert_capacity_factor every expert gets the same number of rows, "
                "whatever the router chooses; leave out one of them"
            )
        if not 0 <= self.state_bytes < inf:
            raise ValueError(f"--state_bytes {self.state_bytes:g}: give 0 or more, such as 2 for AdamW in 8 bits")


@dataclass(kw_only=True)
class SimulateCommand(OnCluster):
    """Predict a step of a layout on a cluster: time, throughput, memory.

    examples:
      hf-helix simulate --model Qwen/Qwen3-8B --cluster h100x8 --tp_size 8 --sequence_length 8192
      hf-helix simulate --model path/to/folder --cluster a40x64 --tp_size 8 --pp_size 2 --microbatches 64 --plan all
      hf-helix simulate --model path/to/folder --cluster h100x16384 --tp_size 8 --pp_size 16 --network x2

    The rates of a cluster stand in a file; the files of hf_helix go by their names, and `hf-helix cluster` measures
    this machine. Operators are counted on torch's meta device: computation, bytes, memory.
    """

    tp_size: int = config_option("tp_size")
    pp_size: int = config_option("pp_size")
    cp_size: int = config_option("cp_size")
    ep_size: int = config_option("ep_size")
    batch_size: int = option(1, "sequences in a micro-batch")
    microbatches: int = option(16, "micro-batches of a step, on each data-parallel rank")
    plan: str = option("greedy", "the rule that makes the plan, or all beside each other", choices=(ALL, *RULES))
    recompute: str = config_option("recompute", default="none", choices=(*RECOMPUTE, OFFLOAD))
    shard_optimizer: bool = config_option("shard_optimizer")
    shard_parameters: bool = config_option("shard_parameters")
    reduce_gradients: str = config_option("reduce_gradients", choices=REDUCE_GRADIENTS)
    offload: str | None = config_option("offload", choices=OFFLOADS)
    spread_vocabulary: bool = config_option("spread_vocabulary")

    @without_collection
    def run(self) -> None:
        """Prints the time and the memory of a step."""
        from hf_helix.doctor.report import step_lines
        from hf_helix.doctor.step import simulate_step, with_usual_reduction

        cluster = self.scaled_cluster()
        case = self._case(cluster)
        simulated = self.simulated_model(cluster)
        case = case.changed(image_share=simulated.image_share(self.sequence_length))
        amounts = simulated.amounts(case)
        case = with_usual_reduction(amounts, case, cluster) if self.reduce_gradients == AUTO else case
        rules = RULES if self.plan == ALL else (self.plan,)
        steps = {rule: simulate_step(amounts, case.changed(plan=rule), cluster) for rule in rules}
        shown = steps[min(steps, key=lambda rule: steps[rule].seconds)]
        print("\n".join([*self.images_lines(simulated), *step_lines(shown, cluster)]))
        if len(steps) > 1:
            print(f"\n{_table(steps)}")
        if self.html:
            self.write_page(
                simulated, cluster, dict(sorted(steps.items(), key=lambda each: each[1].seconds)), _table(steps)
            )

    def _case(self, cluster: Cluster) -> Case:
        ranks = self.tp_size * self.pp_size * self.cp_size
        if cluster.devices % ranks:
            raise ValueError(
                f"{cluster.name} has {cluster.devices} devices, which tp_size x pp_size x cp_size = {ranks} does "
                f"not divide; choose sizes that do, or another number with --gpus"
            )
        dp, ep = cluster.devices // ranks, self.ep_size
        if dp % ep:
            raise ValueError(
                f"--ep_size {ep} does not divide the {dp} data-parallel ranks; values that work divide {dp}"
            )
        options = (
            "recompute",
            "shard_optimizer",
            "shard_parameters",
            "reduce_gradients",
            "offload",
            "spread_vocabulary",
        )
        return self.case_of(
            Sizes(self.tp_size, self.cp_size, self.pp_size, dp, ep),
            batch=self.batch_size,
            microbatches=self.microbatches,
            plan=RULES[0] if self.plan == ALL else self.plan,
            **{name: getattr(self, name) for name in options},
        )


def kept_amounts(path: str, images: int | None, adapters: Mapping[str, Any]) -> KeptAmounts | None:
    """Returns the counts on disk of a configuration; None if its code is not in Transformers.

    Args:
        path: of the configuration, or of its folder.
        images: in a row; None for the model's.
        adapters: the options of adapters.
    """
    from hf_helix.doctor.amounts.kept import KeptAmounts

    file = Path(path)
    try:
        config = json.loads((file / "config.json" if file.is_dir() else file).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or "auto_map" in config:
        return None
    return KeptAmounts({"config": config, "images": images, **adapters})


def _table(steps: Mapping[str, Step]) -> str:
    """Returns a line for every rule."""
    first = next(iter(steps.values()))
    lines = [f"{'plan':<14}{'step':>12}{'tokens/s':>14}{'speed-up':>10}"]
    for rule, step in steps.items():
        gain = first.seconds / step.seconds
        lines.append(f"{rule:<14}{step.seconds:>10.3f} s{step.tokens_per_second:>14,.0f}{gain:>9.2f}x")
    return "\n".join(lines)


def _linked(cluster: Cluster, network: str) -> Cluster:
    """Returns a cluster with other links between nodes: faster by a factor, "x2", or of a speed, "10gbit"."""
    try:
        count, speed, factor = 1, None, float(network.removeprefix("x"))
    except ValueError:
        (count, speed), factor = _links(network), 1.0
    if not 0 < factor < inf:
        raise ValueError(f"--network {network}: give a factor above 0, such as x2 for twice the bandwidth")
    if cluster.nodes == 1:
        raise ValueError(f"--network {network}: one node has no network; leave it out, or ask for more with --gpus")
    link, per_node = replace(cluster.network, bandwidth=factor * cluster.network.bandwidth), cluster.devices_per_node
    if speed is not None and speed.rate:  # of links that the devices of a node share
        links = count if per_node % count == 0 else 1  # unequal shares count as one link
        rate = speed.rate * count / links
        link = replace(link, bandwidth=rate / 8, latency=speed.latency or link.latency, devices=per_node // links)
    text = f"{count} x {speed}" if count > 1 else str(speed or f"x{factor:g}")
    return replace(cluster, network=link, name=f"{cluster.name}, network {text}")


NETWORKS = {"edr": "100gbit", "hdr": "200gbit", "ndr": "400gbit", "xdr": "800gbit"}
"""Names of InfiniBand links, and their speeds."""


def _links(network: str) -> tuple[int, LinkSpeed]:
    """Returns the number of a node's links, and the speed of each: of 10gbit, 100gbe, 8x400gbit, 8xndr,5us."""
    number, times, rest = network.lower().partition("x")
    number, rest = (number, rest) if times and number.isdecimal() else ("1", network.lower())
    first, comma, latency = rest.partition(",")
    speed = re.sub(r"gbe$", "gbit", NETWORKS.get(first, first))
    try:
        count = int(number)
        if count < 1:
            raise ValueError(f"{count} links")
        return count, parse_link(speed + comma + latency)
    except ValueError as error:
        raise ValueError(
            f"--network {network}: give a factor, such as x2, or a node's links, such as 10gbit, 8x400gbit, or 8xndr"
        ) from error


def _resized(cluster: Cluster, gpus: str) -> Cluster:
    """Returns a cluster with a number of devices, "16", in nodes like its own, or of a form, "2x4"."""
    numbers = [int(word) if word.isdecimal() else 0 for word in gpus.split("x")]
    if len(numbers) > 2 or min(numbers) < 1:
        raise ValueError(f"--gpus {gpus}: give 1 or more devices, such as 16, or nodes x devices, such as 2x4")
    devices = prod(numbers)
    per_node = numbers[1] if len(numbers) == 2 else min(devices, cluster.devices_per_node)
    if devices % per_node:
        raise ValueError(f"--gpus {gpus}: nodes have {per_node} devices each; give a multiple, such as {2 * per_node}")
    if devices > per_node and isinf(cluster.network.bandwidth):
        raise ValueError(
            f"--gpus {gpus}: {cluster.name} has no `network`, which more than {per_node} devices need; add one to "
            "its file, such as network: {gb_per_s: 50, latency_us: 8, devices_per_link: 1}"
        )
    nodes = devices // per_node
    name = f"{nodes} x {per_node} {cluster.device.name}"
    network = cluster.network
    if network.devices == cluster.devices_per_node:  # the devices of a node share a link
        network = replace(network, devices=per_node)
    return replace(cluster, nodes=nodes, devices_per_node=per_node, network=network, name=name)
