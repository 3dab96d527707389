"""hf-helix check: is a model, cut into parts, equal to the unsplit Transformers model?

In:   a folder, a name on the Hub, a configuration, or the name of a class; sizes of the mesh.
Out:  a line for each layout: equal, different, refused or failed, with the largest differences.
      With --operators, for every kind of unit the operators of its forward pass in order, and the cuts of its
      parameters: training runs these operators; the backward pass is derived from them, and a plan orders both.
Must hold: the processes are started here, on the CPU, unless a launcher did; the status is 1 if a layout is different
    or has failed, or if none was proven.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_helix.cli.options import Command, argument, config_option, configuration_file, option
from hf_helix.config import FLOAT8, HelixConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hf_helix.engine.proof.prove import Subject
    from hf_helix.engine.proof.verdict import Proof
    from hf_helix.operators.units.unit import Unit
    from hf_helix.planning.parameters import Cut


@dataclass(kw_only=True)
class CheckCommand(Command):
    """Compare a model, cut into parts, with the unsplit model: losses, gradients, logits.

    examples:
      hf-helix check Qwen/Qwen3-0.6B                                the usual layouts, each over two ranks
      hf-helix check path/to/folder --tp_size 2 --pp_size 2         this layout
      hf-helix check path/to/folder --config_file helix.yaml        the layouts that a file names
      hf-helix check Gemma2ForCausalLM                              a class of Transformers
      hf-helix check Gemma2ForCausalLM --operators                  the operators of its layers
      torchrun --nproc-per-node 2 -m hf_helix check Qwen/Qwen3-0.6B on these processes and their devices

    Compared are losses, every gradient by name, and the logits of predict(), in fp32 on random weights
    large enough for caps, norms and windows to matter, with rows that are padded, packed, and of lengths that do not
    divide. Figures are relative: of a loss to itself (equal up to 1e-5), of a gradient to its norm (1e-4), of logits to
    the largest (1e-4). With --float8, the error of products in fp8 next to bf16's is also printed. Of the model only
    the configuration is read. Its own sizes are cut on the meta device, without memory, to see if heads, layers and
    experts divide; the compared models are small, unless --as_is keeps the sizes. Without any size, the usual layouts
    are checked.
    """

    model: str = argument(
        ..., "a folder with a config.json, such a file, a name on the Hub, or a class of Transformers"
    )
    tp_size: int | None = config_option("tp_size", default=None)
    pp_size: int | None = config_option("pp_size", default=None)
    cp_size: int | None = config_option("cp_size", default=None)
    ep_size: int | None = config_option("ep_size", default=None)
    float8: str | None = config_option("float8", default=None, choices=FLOAT8)
    config_file: Path | None = option(None, "a file with options, such as helix.yaml; of `layouts`, each is checked")
    imports: list[str] | None = option(None, "modules with families of your own, such as starcoder2 for starcoder2.py")
    as_is: bool = option(False, "keep the sizes of the configuration")
    operators: bool = option(
        False, "compare nothing; print the operators of a layer of every kind on a rank of tp_size 2"
    )
    verbose: bool = option(False, "also print a line for each kind of batches")

    def run(self) -> None:
        """Checks every layout, and prints each verdict at once."""
        from hf_helix.engine.proof.prove import Subject, is_class
        from hf_helix.engine.proof.verdict import Proof
        from hf_helix.testing import configs_for, layout_text, prove_layouts

        asked = {name: value for name, value in self.of_config().items() if value is not None}
        if self.config_file is not None and asked:
            raise ValueError(
                f"--config_file {self.config_file} with --{next(iter(asked))}: the file has the sizes; give one"
            )
        float8 = asked.pop("float8", None)
        layouts = _layouts_in(self.config_file) if self.config_file is not None else [asked] if asked else None
        given = self.model if is_class(self.model) else configuration_file(self.model)
        sys.path.insert(0, "")  # a console script has the folder of its own file there
        for module in self.imports or []:
            importlib.import_module(module)
        subject = Subject.of(given, self.as_is)
        if self.operators:
            return _print_operators(subject, {"tp_size": 2, **asked})
        is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if is_launched:
            _join_ranks()
        configs = configs_for(subject, layouts)
        misfits = _misfits(subject, configs)
        proofs = [Proof(subject.name, layout_text(each), refusal=reason) for each, reason in misfits]
        fitting = [each for each in configs if each not in dict(misfits)]
        cut = [{**each.option_sizes, "float8": float8 or each.float8} for each in fitting]
        for proof in prove_layouts(subject, cut, self.imports or [], _say_start) if cut else ():
            proofs.append(proof)
            if not proof.refusal:
                _say(proof, self.verbose)
        for reason in dict.fromkeys(proof.refusal for proof in proofs if proof.refusal):
            same = [proof for proof in proofs if proof.refusal == reason]
            every = "every layout" if len(same) == len(proofs) > 1 else "; ".join(proof.layout for proof in same)
            _say(replace(same[0], layout=every), self.verbose)
        if is_launched:
            import torch.distributed as dist

            dist.destroy_process_group()
        bad = any(proof.verdict in ("different", "failed") for proof in proofs)
        if bad or not any(proof.ok for proof in proofs):
            sys.exit(1)


def _layouts_in(file: Path) -> list[Mapping[str, Any]]:
    """Returns the sizes of the layouts that a file names, each once. Raises ValueError for wrong options."""
    given = HelixConfig.from_file(file)
    configs = given.by_world().values() if given.layouts is not None else [given]
    options = [{**config.option_sizes, "float8": config.float8} for config in configs]
    return [each for place, each in enumerate(options) if each not in options[:place]]


def _misfits(subject: Subject, configs: Sequence[HelixConfig]) -> list[tuple[HelixConfig, str]]:
    """Returns the layouts that cannot cut a configuration at its own sizes, each with the reason; of a class, which has
    no sizes, all of several if its code cannot be derived."""
    from hf_helix.doctor.counting import check_cut, kinds_of
    from hf_helix.engine.proof.prove import reason_of
    from hf_helix.engine.synthetic import model_on_meta

    if subject.config is None and len(configs) == 1:  # the proof will report it at once
        return []
    try:
        model = subject.build() if subject.config is None else model_on_meta(subject.config)
        kinds = kinds_of(model)
    except Exception as error:  # the reason, as in a proof
        return [(config, reason_of(error)) for config in configs]
    found = []
    for config in configs if subject.config is not None else ():
        try:
            check_cut(model, kinds, config)
        except Exception as error:
            found.append((config, reason_of(error)))
    return found


def _print_operators(subject: Subject, sizes: Mapping[str, Any]) -> None:
    """Prints the units of a model on the first rank of a layout. Nothing is communicated."""
    from hf_helix.models.graph.context import ParallelContext
    from hf_helix.models.registry import family_for
    from hf_helix.operators.communication.transport import Axis, SilentTransport

    if sizes.get("pp_size", 1) > 1:
        raise ValueError("--operators shows layers, which a pipeline leaves whole; leave --pp_size out")
    config = HelixConfig(**sizes)
    model = subject.build(config)
    tp, cp, experts = (
        Axis(SilentTransport(size, 0)) for size in (config.tp_size, config.cp_size, config.ep_size * config.tp_size)
    )
    family = family_for(model, config.tp_size)
    print(_text_of_units(model, family.units(model, ParallelContext(tp, cp, experts))))


def _join_ranks() -> None:
    """Joins the processes of the launcher, on their devices."""
    import torch
    import torch.distributed as dist

    from hf_helix.runtime.distributed.environment import load_eagerly

    cuda = torch.cuda.is_available()
    if cuda:
        load_eagerly()  # layouts with a pipeline are among those that follow
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")


def _say_start(layout: str) -> None:
    """Says on rank 0 which layout is being proven; the verdict follows in the next line."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{layout} ...", file=sys.stderr, flush=True)


def _say(proof: Proof, verbose: bool) -> None:
    """Says a verdict on rank 0."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    print(proof)
    for line in proof.lines if verbose or proof.trace else ():
        print("  " + line.rstrip().replace("\n", "\n  "))
    sys.stdout.flush()


def _text_of_units(model: Any, units: Sequence[Unit]) -> str:
    """Returns the operators of every kind of unit, and the cuts of its parameters."""
    kinds: dict[str, list[Unit]] = {}
    for unit in units:
        kinds.setdefault(unit.graphs.forward.name, []).append(unit)
    return "\n\n".join(_text_of_kind(model, same) for same in kinds.values())


def _text_of_kind(model: Any, same: Sequence[Unit]) -> str:
    unit = same[0]
    rows = [
        (op.name, type(unit.operators[op.name]).__name__, ", ".join(op.reads)) for op in unit.graphs.forward.operators
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    cuts = [(names[id(parameter)], _cut(parameter, placed)) for parameter, placed in unit.placements.items()]
    labels = ", ".join(other.label for other in same)
    return "\n".join([f"{labels}: operators", *_table(rows), f"{labels}: parameters", *_table(cuts)])


def _cut(parameter: Any, placed: Cut) -> str:
    shape = "x".join(map(str, parameter.shape))
    if placed.dim is None:
        return f"{shape}, on every rank" + (", gradients summed over the ranks" if placed.sums_gradient else "")
    blocks = f", in blocks of {', '.join(map(str, placed.blocks))}" if placed.is_fused else ""
    return f"{shape}, dimension {placed.dim} cut over {placed.mesh_axis}{blocks}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
