"""The classes of pytorch_optimizer, each as in one process or not, with matrices over two ranks.

Cuts a tiny Llama over two ranks, and steps it with every class by `granularity = "matrix"`, on the same random
gradients as an uncut model in one process. A class is right in a layout if the weights after the last step are those of
the uncut model (to 1e-4 of what the steps have changed). Classes that cannot step in one process (such as those that
need a closure) are left out.

    pip install pytorch_optimizer
    python -m benchmarks.optimizer_classes
"""

import argparse
import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.common import add_outputs, columns, facts, options_of, save
from benchmarks.ranks import Ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_parameters": {"shard_parameters": True},
}
TOLERANCE = 1e-4


def main() -> None:
    parser = options_of(__doc__, steps=8)
    parser.add_argument("--only", nargs="+", help="names of classes; all without")
    add_outputs(parser)
    Ranks().run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank: every class in one process and in every layout."""
    warnings.simplefilter("ignore")
    rows = []
    for name, kind in classes(options.only):
        expected = weights_after(kind, None, options.steps)
        if isinstance(expected, str):
            rows.append([name, *[""] * len(LAYOUTS), f"one process: {expected}"])
            continue
        found = [compared(expected, weights_after(kind, layout, options.steps)) for layout in LAYOUTS.values()]
        rows.append([name, *found, ""])
    if options.rank == 0:
        text = columns(["class", *LAYOUTS, "left out"], rows)
        counts = [sum(row[place] == "right" for row in rows) for place in range(1, 1 + len(LAYOUTS))]
        summary = ", ".join(f"{count} right with {layout}" for layout, count in zip(LAYOUTS, counts, strict=True))
        text += f"\n{len(rows)} classes, {sum(not row[-1] for row in rows)} of them step here in one process: {summary}"
        print(f"{facts()}\n{text}", flush=True)
        save(options, "Classes of pytorch_optimizer over two ranks", __doc__, text, rows)


def classes(only: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Yields the optimizers of the package by name."""
    from pytorch_optimizer.optimizer import OPTIMIZERS

    known = {kind.__name__: kind for kind in OPTIMIZERS.values() if isinstance(kind, type)}
    yield from ((name, kind) for name, kind in sorted(known.items()) if not only or name in only)


def weights_after(kind: Any, layout: dict[str, Any] | None, steps: int) -> Any:
    """Returns the full weights after some steps, by name with the weights before; the error's first line if a step has
    failed on any rank."""
    from hf_helix.runtime.distributed.agreement import all_gather_object

    try:
        result = stepped(kind, layout, steps)
    except Exception as error:
        result = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:60]
    if layout is not None:
        said = [each for each in all_gather_object(result if isinstance(result, str) else "") if each]
        result = said[0] if said else result
    return result


def stepped(kind: Any, layout: dict[str, Any] | None, steps: int) -> Any:
    """Steps a tiny model on random gradients."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    engine = None if layout is None else cut(model, layout)
    torch.manual_seed(1)  # of optimizers that draw
    optimizer = made(kind, model)
    if engine is not None:
        engine.weights.step_shards(optimizer, reads_matrices=True)
    generator = torch.Generator().manual_seed(2)
    means = {name: torch.randn(each.shape, generator=generator) * 0.1 for name, each in before.items()}
    for _ in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = means[name] + torch.randn(before[name].shape, generator=generator) * 0.05
        optimizer.step()
    return {name: (before[name], full(each)) for name, each in model.named_parameters()}


def made(kind: Any, model: Any) -> Any:
    """Returns an optimizer of all parameters; of a class that asks for it, of matrices and others in two groups."""
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() == 2) is has_two], "use_muon": has_two}
        for has_two in (True, False)
    ]
    try:
        return kind(list(model.parameters()), lr=1e-2)
    except Exception:
        return kind(groups, lr=1e-2)


def full(parameter: Any) -> Any:
    from hf_helix.runtime.divided import full_of

    return full_of(parameter).detach().clone()


def cut(model: Any, layout: dict[str, Any]) -> Any:
    """Returns the engine of a model."""
    import torch

    from hf_helix.config import HelixConfig
    from hf_helix.engine.cut.build import RunOptions
    from hf_helix.engine.engine import Engine
    from hf_helix.models.direct_use import Instead
    from hf_helix.runtime.distributed.mesh import mesh_of

    config = HelixConfig(plan="greedy", **layout)
    return Engine(model, config, mesh_of(config, torch.device("cpu")), RunOptions(), Instead("", ""))


def compared(expected: Any, found: Any) -> str:
    """Returns `right`, the largest difference as a part of what the steps have changed, or the error."""
    if isinstance(found, str):
        return found
    off = max(
        float((found[name][1] - after).norm() / (after - before).norm().clamp(min=1e-8))
        for name, (before, after) in expected.items()
    )
    return "right" if off < TOLERANCE else f"off by {off:.0e}"


if __name__ == "__main__":
    main()
