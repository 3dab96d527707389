"""hf-helix doctor: the fastest layout of a model on a cluster, with enough memory.

In:   a model's configuration, a cluster file, the tokens of a step.
Out:  the best layouts and plain data parallelism, the parts of the best, and the YAML to launch the best.
Must hold: nothing is measured; an impossible layout, or a layout without enough memory, is never proposed, and --why
prints every reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_helix.cli.options import option, parse_count
from hf_helix.cli.simulate import OnCluster
from hf_helix.config import AUTO, OF_A_NODE, OFFLOADS, WITH_FEWER_NODES, HelixConfig, format_rate
from hf_helix.measure.progress import progress_bar
from hf_helix.planning.collection import without_collection
from hf_helix.planning.rules.registry import runs_one_strand
from hf_helix.planning.timing.cluster import Cluster, load_cluster
from hf_helix.planning.timing.sizes import Sizes, is_named, size_text
from hf_helix.runtime.distributed.host import usable_cores

if TYPE_CHECKING:
    from hf_helix.doctor.case import Case
    from hf_helix.doctor.layouts import Ranking
    from hf_helix.doctor.simulated import SimulatedModel
    from hf_helix.doctor.step import Step

FROZEN = 2  # bytes of a frozen element, in the type of most checkpoints
PROMISING = 3  # fitting layouts that a suggestion looks at, the most promising first


@dataclass(kw_only=True)
class DoctorCommand(OnCluster):
    """Find the fastest layout of a model on a cluster, with enough memory.

    examples:
      hf-helix doctor --model Qwen/Qwen3-8B --cluster h100x8 --batch_tokens 4M
      hf-helix doctor --model path/to/folder --cluster a40x64 --batch_tokens 4M --top 5 --write helix.yaml
      hf-helix doctor --model path/to/folder --cluster a40x64 --batch_tokens 4M --why
      hf-helix doctor --model path/to/folder --cluster l40sx8 --batch_tokens 512k --lora_r 16
      hf-helix doctor --model Qwen/Qwen3-8B --cluster h100x8 --html doctor.html
      hf-helix doctor --model Qwen/Qwen3-8B --cluster h100x8 --gpus 4x8,3x8,2x8 --write helix.yaml

    HelixTrainer reads what the doctor found last for a model and a number of devices, and says at the first step of a
    run on such devices, with sequences and steps about as long, if another layout is clearly faster; what is found with
    --network, --imbalance or --expert_capacity_factor is not kept. A prediction is as exact as the rates in the
    cluster's file: `hf-helix cluster` measures the rates of this machine. Layouts within a few percent of each other
    are best told apart by training a few steps with each.
    """

    batch_tokens: str = option("4M", "tokens of an optimizer step, such as 512k (512,000) or 4M")
    tokens: str | None = option(None, "tokens of the whole training, such as 100B; also says its days and device hours")
    offload: str = option(
        AUTO,
        "what lies in the memory of the host: optimizer (masters and states); parameters (all weights, too); none; "
        "auto: the optimizer where that is clearly faster, the parameters where nothing fits otherwise",
        choices=(AUTO, "none", *OFFLOADS),
    )
    top: int = option(5, "how many layouts are shown")
    layout: str = option("", "the layout to show and write, such as 'tp 2 x pp 4'; left out, the best")
    why: bool = option(False, "also say why each other layout was dropped")
    write: Path | None = option(
        None, "write the YAML that launches the best layout, or that of --layout; of several --gpus, a layout for each"
    )

    @classmethod
    def run_all(cls, commands: Sequence[Any]) -> None:
        """Prints the best layouts; of several commands, only the best layout of each, in one table.

        Raises:
            ValueError: several commands are asked for one layout, or write one file about more than numbers of devices.
        """
        first = commands[0]
        if len(commands) == 1:
            first.run()
            return
        is_one_run = len({(each.network, each.sequence_length) for each in commands}) == 1
        about_one = ("layout", "html", "why", "tokens", *["write"] * (not is_one_run))
        if unclear := [name for name in about_one if getattr(first, name)]:
            raise ValueError(f"--{unclear[0]} is about one answer; give one --gpus, --network and --sequence_length")
        if first.write:
            first._write_layouts(commands)
        else:
            first._print_answers(commands)

    @without_collection
    def _write_layouts(self, commands: Sequence[DoctorCommand]) -> None:
        """Writes the best layout for each number of devices, with equal samples in a step and in a micro-batch.

        Raises:
            ValueError: no layout fits for a number of devices, or two commands have the same number.
        """
        from hf_helix.doctor.layouts import BATCHES, shared_samples
        from hf_helix.doctor.report import answer_lines

        assert self.write is not None
        clusters = [command.scaled_cluster() for command in commands]
        numbers = [cluster.devices for cluster in clusters]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"--gpus: {numbers} are no different numbers of devices; a run has a layout for each")
        asked = parse_count(self.batch_tokens, "--batch_tokens", "512k or 4M")
        tokens = shared_samples(max(1, round(asked / self.sequence_length)), numbers) * self.sequence_length
        like: SimulatedModel | None = None
        models = [like := each.simulated_model(cluster, like) for each, cluster in zip(commands, clusters, strict=True)]
        cases = list(zip(commands, models, clusters, strict=True))

        def steps_with(batches: Sequence[int]) -> list[Step]:
            return [each._proposed(model, cluster, tokens, batches) for each, model, cluster in cases]

        steps = steps_with(BATCHES)
        rows = min(step.case.batch for step in steps)
        if any(step.case.batch != rows for step in steps):
            steps = steps_with([rows])
        answers = sorted(zip(clusters, steps, strict=True), key=lambda each: -each[0].devices)
        print(f"{models[0].name} on {clusters[0].device.name}, {tokens:,} tokens in a step\n")
        print("\n".join(answer_lines([(cluster, self.sequence_length, step) for cluster, step in answers])))
        self.write.write_text(layouts_file(answers, self.write))
        print(f"\n{_step_text(answers[0][1])}\n{_elastic_command(answers, self.write)}")

    def _proposed(self, simulated: SimulatedModel, cluster: Cluster, tokens: int, batches: Sequence[int]) -> Step:
        """Returns the step to train with, of exactly so many tokens, in micro-batches of one of these sizes. Raises
        ValueError if none fits."""
        ranking = self._ranking(simulated, cluster, tokens, off=0.0, batches=batches)
        if not ranking.steps:
            self._refuse(ranking, simulated, cluster, tokens)
        return ranking.proposed(cluster)

    @without_collection
    def _print_answers(self, commands: Sequence[DoctorCommand]) -> None:
        from hf_helix.doctor.report import answer_lines

        tokens, like = parse_count(self.batch_tokens, "--batch_tokens", "512k or 4M"), None
        answers: list[tuple[Cluster, int, Step | str]] = []
        for command in commands:
            cluster = command.scaled_cluster()
            like = command.simulated_model(cluster, like)
            ranking = command._ranking(like, cluster, tokens)
            found = ranking.proposed(cluster) if ranking.steps else "no layout fits"
            answers.append((cluster, command.sequence_length, found))
        assert like is not None
        print(f"{like.name} on {load_cluster(self.cluster).device.name}, {tokens:,} tokens a step asked for\n")
        print("\n".join(answer_lines(answers)))

    @without_collection
    def run(self) -> None:
        """Prints the best layouts."""
        from hf_helix.doctor.amounts.records import STATES
        from hf_helix.doctor.layouts import CLOSE
        from hf_helix.doctor.report import (
            checkpoint_line,
            dropped_lines,
            help_lines,
            ranking_lines,
            roomier_text,
            shown_steps,
            training_line,
        )
        from hf_helix.tuning.found_layouts import remember

        tokens = parse_count(self.batch_tokens, "--batch_tokens", "512k or 4M")
        of_training = parse_count(self.tokens, "--tokens", "20B or 1.5T") if self.tokens is not None else None
        cluster = self.scaled_cluster()
        simulated = self.simulated_model(cluster)
        ranking = self._ranking(simulated, cluster, tokens)
        if not ranking.steps:
            self._refuse(ranking, simulated, cluster, tokens)
        best = ranking.steps[0]
        chosen = self._chosen(ranking) if self.layout else ranking.proposed(cluster)
        assumes_rows = self.imbalance > 1 or self.expert_capacity_factor is not None
        usual = (
            self.network is None
            and self.state_bytes == STATES
            and not (best.case.config.offload or best.case.config.float8)
        )
        if usual and not assumes_rows:  # a run gets no advice from assumptions
            speeds = {step.case.sizes: step.tokens_per_second for step in ranking.steps}
            remember(simulated.facts.digest, speeds, cluster, self.dtype, self.sequence_length, tokens)
        trained = f", LoRA adapters of rank {self.lora_r}" if self.lora_r else ""
        devices = f"{cluster.name}, {cluster.devices} devices"
        print(f"{simulated.name}{trained} on {devices}, {tokens:,} tokens a step asked for")
        if cluster.nodes > 1:
            rate, sharing = format_rate(8 * cluster.network.bandwidth), cluster.network.devices
            other = "" if self.network else "; --network 10gbit asks about another one"
            print(f"Links between nodes of {rate}, each for {sharing} devices{other}")
        print()
        lines = [*ranking_lines(ranking, cluster, self.top, simulated.experts)]
        lines += help_lines(ranking, lambda: self._what_helps(simulated, tokens, (1 + CLOSE) * best.tokens_per_second))
        print("\n".join(lines))
        for line in self.images_lines(simulated):
            print(line)
        if simulated.experts > 1 and not assumes_rows:
            print("Experts get equal rows here; --imbalance 1.3 leaves time and memory for 1.3 times the mean.")
        title = "The best" if chosen is best else "As asked" if self.layout else roomier_text(best, cluster)
        _print_step(chosen, title, simulated, cluster)
        print(checkpoint_line(simulated.facts.trained, chosen.case))
        if cluster.devices > 1:
            print(self._alone_line(chosen, simulated, cluster, tokens))
        if of_training is not None:
            print(training_line(chosen, of_training, cluster, simulated.experts))
        if self.html:
            self.write_page(simulated, cluster, shown_steps(ranking, cluster, self.top), "\n".join(lines))
        if self.why:
            print("\nDropped:")
            print("\n".join(dropped_lines(ranking.dropped)))
        if not self.write:
            others = [size_text(step.case.sizes) for step in ranking.steps if step is not chosen]
            another = f"; --layout '{others[0]}' takes that row" if others else ""
            print(f"\n--write helix.yaml writes the file that launches it{another}.")
        else:
            self.write.write_text(launch_file(chosen, cluster))
            case, several = chosen.case, cluster.nodes > 1
            node = f"{OF_A_NODE} " if several else ""
            print(
                f"\n{_step_text(chosen)}{', on each node with its own RANK' if several else ''}:\n"
                f"{size_text(case.sizes)}: accelerate launch --config_file {self.write} {node}YOUR_SCRIPT.py"
            )

    def _refuse(self, ranking: Ranking, simulated: SimulatedModel, cluster: Cluster, tokens: int) -> None:
        """Raises ValueError: no layout fits; with what does."""
        from hf_helix.doctor.report import dropped_lines

        check_derived(simulated)
        helps = [
            f"{each.name}, {each.step.tokens_per_second:,.0f} tokens/s" for each in ranking.fitting_rivals(cluster)
        ]
        helps += self._what_helps(simulated, tokens)
        reasons = "\n".join(dropped_lines(ranking.dropped)).lstrip()
        known = f"what fits, predicted: {'; '.join(helps)}"
        more = (
            "more devices (--gpus), shorter sequences (--sequence_length) or more tokens in a step (--batch_tokens) may"
        )
        raise ValueError(f"no layout of {self.model} fits {cluster.name}; {known if helps else more}; {reasons}")

    def _alone_line(self, step: Step, simulated: SimulatedModel, cluster: Cluster, tokens: int) -> str:
        """Returns the comparison of a step with one device, with the same options."""
        from hf_helix.doctor.report import alone_line

        one = replace(self, gpus="1", network=None, layout="", offload=step.case.config.offload or "none")
        other = one.scaled_cluster()
        steps = one._search(simulated.on(other), other, tokens, leading=1).steps
        return alone_line(step, steps[0] if steps else None, cluster)

    def _ranking(self, simulated: SimulatedModel, cluster: Cluster, tokens: int, **of_step: Any) -> Ranking:
        """Returns the layouts, with states or weights on the host if that helps: with the optimizer, if nothing fits
        without or the fastest recomputes while devices have its states; with the parameters, if nothing fits with that;
        `of_step` are fields of `Search`."""
        optimizer, parameters = OFFLOADS
        may_offload = self.offload == AUTO and self.cuda_graphs != "true"  # a graph cannot copy to the host
        offloads = {optimizer: not self.lora_r, parameters: False} if may_offload else {}
        return self._search(simulated, cluster, tokens, self.top, offloads=offloads, **of_step)

    def _chosen(self, ranking: Ranking) -> Step:
        """Returns the step of `layout`.

        Raises:
            ValueError: no such layout fits; with the reason, or the layouts that do.
        """
        for step in ranking.steps:
            if is_named(step.case.sizes, self.layout):
                return step
        why = [each.reason for each in ranking.dropped if is_named(each.case.sizes, self.layout)]
        raise ValueError(
            f"--layout {self.layout!r}: {why[0] if why else 'there is no such layout of these devices'}; use one of "
            f"{', '.join(repr(size_text(step.case.sizes)) for step in ranking.steps)}"
        )

    def _what_helps(self, simulated: SimulatedModel, tokens: int, least: float = 0.0) -> list[str]:
        """Returns the changed options under which a quick search, of the `PROMISING` layouts that fit, finds one with
        more than `least` tokens a second, each with the layout."""
        from hf_helix.doctor.amounts.records import STATES

        cluster, found = self.scaled_cluster(), []
        changes: list[dict[str, Any]] = [{"lora_r": 16}] if not self.lora_r else []
        changes += [{"state_bytes": 2}] if self.state_bytes == STATES and not self.lora_r else []
        changes += [{"offload": OFFLOADS[0]}] if self.offload == "none" and not self.lora_r else []
        changes += [{"gpus": f"{2 * cluster.nodes}x{cluster.devices_per_node}"}]
        changes += [{"network": "100gbit"}] if cluster.nodes > 1 and not self.network else []
        for change in changes:
            other = replace(self, **change)
            try:
                cluster = other.scaled_cluster()
                if "lora_r" in change and simulated.facts.trained * FROZEN > cluster.devices * cluster.device.memory:
                    continue
                model = other.simulated_model(cluster) if "lora_r" in change else simulated.on(cluster)
                steps = other._search(model, cluster, tokens, leading=0, enough=PROMISING).steps
            except ValueError:  # such as no network to further devices
                continue
            if steps and steps[0].tokens_per_second > least:
                name, speed = size_text(steps[0].case.sizes), steps[0].tokens_per_second
                found.append(
                    f"{' '.join(f'--{key} {value}' for key, value in change.items())}: {name}, {speed:,.0f} tokens/s"
                )
        return found

    def _search(
        self, simulated: SimulatedModel, cluster: Cluster, tokens: int, leading: int, **of_step: Any
    ) -> Ranking:
        """Returns the layouts with enough memory, the fastest first; `leading` are predicted at higher fidelity."""
        from hf_helix.doctor.layouts import Search

        offload = self.offload if self.offload in OFFLOADS else None
        share = simulated.image_share(self.sequence_length)
        with progress_bar() as progress:
            return Search(
                simulated,
                cluster,
                tokens,
                self.case_of(Sizes(), offload=offload, image_share=share),
                progress=progress,
                workers=usable_cores(),
                leading=leading,
                layout=self.layout,
                wanted=max(1, leading),
                **of_step,
            ).run()


def check_derived(simulated: SimulatedModel) -> None:
    """Raises ValueError if no layout at all can be made of a model."""
    from hf_helix.models.registry import family_of
    from hf_helix.models.stock.peft import base_of

    base = base_of(simulated.model)
    family_of(base).digest(base)


def _print_step(step: Step, title: str, simulated: SimulatedModel, cluster: Cluster) -> None:
    """Prints the parts of a step, and the gain over one strand or of sharding the optimizer."""

    from hf_helix.doctor.layouts import ONE_STRAND
    from hf_helix.doctor.report import shards_line, step_lines
    from hf_helix.doctor.step import OF_STEPS, simulate_step
    from hf_helix.doctor.window import Fidelity

    def other(**options: Any) -> Step:
        case = step.case.changed(**options)

        def find() -> Step:
            return simulate_step(simulated.amounts(case), case, cluster, Fidelity.TIMED, simulated.of_window(case))

        return simulated.answer(("step", cluster), case, find, OF_STEPS)

    print(f"\n{title}:")
    print("\n".join(step_lines(step, cluster)))
    if step.case.config.plan != ONE_STRAND:
        alone = other(plan=ONE_STRAND)
        print(
            f"  one strand    {alone.seconds:10.3f} s     two strands are {alone.seconds / step.seconds:.2f}x as fast"
        )
    if step.case.sizes.spread() and not (step.case.config.shard_optimizer or step.case.config.shard_parameters):
        print(shards_line(step, other(shard_optimizer=True)))


def launch_file(step: Step, cluster: Cluster) -> str:
    """Returns the configuration file of a layout for `accelerate launch`."""
    machine = f"accelerate launch --config_file FILE {OF_A_NODE} YOUR_SCRIPT.py"
    several = f"On every machine, with its own RANK:\n# {machine}" if cluster.nodes > 1 else ""
    return _file(step, cluster, options_of(step.case) or {"tp_size": 1}, several)


def layouts_file(answers: Sequence[tuple[Cluster, Step]], path: Path) -> str:
    """Returns the configuration file of a run with a layout for each number of devices.

    Args:
        answers: the clusters and their steps, the most devices first.
        path: of the file.
    """
    layouts = {cluster.devices: options_of(step.case) for cluster, step in answers}
    cluster, step = answers[0]
    speeds = ", ".join(f"{each.tokens_per_second:,.0f} on {on.devices}" for on, each in answers[1:])
    more = f"{_elastic_command(answers, path)}\nTokens/s with fewer devices: {speeds}."
    return _file(step, cluster, {"layouts": layouts}, more.replace("\n", "\n# "))


def options_of(case: Case) -> dict[str, Any]:
    """Returns the options of `HelixConfig` for a case that are not the usual ones."""
    config, usual = case.config, HelixConfig()
    counts_images = config.pp_size > 1 and not config.layers_per_stage
    written = replace(
        config,
        plan=config.plan if runs_one_strand(config.plan) else usual.plan,
        schedule=config.schedule if config.pp_size > 1 else usual.schedule,
        image_share=round(config.image_share, 3) if counts_images else usual.image_share,
        recompute=config.recompute if config.recompute != "none" else usual.recompute,
        reduce_gradients=config.reduce_gradients if config.shard_parameters else usual.reduce_gradients,
    )
    options = {each.name: getattr(written, each.name) for each in fields(written)}
    given = {name: value for name, value in options.items() if value != getattr(usual, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _file(step: Step, cluster: Cluster, helix: Mapping[str, Any], more: str) -> str:
    """Returns a file for `accelerate launch` with a comment on its first step, and `more`."""
    from hf_helix.doctor.memory import bytes_text

    data = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if cluster.devices > 1 else "NO",
        "use_cpu": cluster.backend != "nccl",
        "num_machines": cluster.nodes,
        "num_processes": cluster.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": step.case.dtype if step.case.dtype == "bf16" else "no",
        "parallelism_config": {"helix": dict(helix)},
    }
    on_host = f" Needs {bytes_text(step.host)} of memory of each node's host." if step.host else ""
    return (
        f"# Proposed by hf-helix doctor for {cluster.name}: {step.tokens_per_second:,.0f} tokens/s predicted.\n"
        f"# {_step_text(step)}.{on_host}\n{f'# {more}' if more else ''}\n".replace("\n\n", "\n")
        + yaml.safe_dump(data, sort_keys=False)
    )


def _step_text(step: Step) -> str:
    case = step.case
    return (
        f"With per_device_train_batch_size={case.batch}, gradient_accumulation_steps={case.microbatches} and sequences "
        f"of {case.length:,} tokens"
    )


def _elastic_command(answers: Sequence[tuple[Cluster, Step]], path: Path) -> str:
    """Returns the command of each node; `answers` have the most devices first."""
    nodes, devices = zip(*((cluster.nodes, cluster.devices_per_node) for cluster, _ in answers), strict=True)
    if len(set(devices)) > 1 or len(set(nodes)) == 1:
        return f"HELIX_CONFIG_FILE={path}, with as many processes as a layout has devices."
    precision = "TrainingArguments(bf16=True) and " * (answers[0][1].case.dtype == "bf16")
    command = WITH_FEWER_NODES.format(file=path, nodes=f"{min(nodes)}:{max(nodes)}", devices=devices[0])
    return f"On every node, with {precision}a HOST that stays:\n{command}"
