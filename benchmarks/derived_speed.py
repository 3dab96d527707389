"""Step time of a derived Llama against the declared one: what derivation costs where both can be had.

Measured: the wall-clock time of windows (forward and backward of every micro-batch, without an optimizer) of one
process, of two runners over copies of one Llama: one whose family is declared in the package, one whose family is
derived from the model. Both under the plan `sequential`, in fp32 on the CPU.

How: both runners live in one process and run windows in turn; who goes first changes from round to round. The table
shows the medians, and the median and the quartiles of the ratio of a round. Gradients are compared as well.

    python -m benchmarks.derived_speed
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.common import llama, options_of
from hf_helix import HelixConfig
from hf_helix.engine.build import build_runner
from hf_helix.engine.microbatches import LossScale, WindowMaker
from hf_helix.engine.recompute import modes_of
from hf_helix.models import registry
from hf_helix.models.derived import DerivedFamily
from hf_helix.runtime.distributed.mesh import build_mesh

DECLARED, DERIVED = "declared", "derived"


def main() -> None:
    options = options_of(__doc__, hidden_size=256, layers=4, length=128, microbatches=4, rounds=20).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = llama(options.hidden_size, options.layers, num_key_value_heads=4)
    model = LlamaForCausalLM(config).train()
    runs = {name: Run(copy.deepcopy(model), name, options) for name in (DECLARED, DERIVED)}
    ratios, times = [], {name: [] for name in runs}
    for number in range(options.rounds + 2):
        order = list(runs) if number % 2 else list(reversed(list(runs)))
        seconds_of_ways = {name: runs[name].time() for name in order}
        if number >= 2:
            ratios.append(seconds_of_ways[DERIVED] / seconds_of_ways[DECLARED])
            for name, seconds in seconds_of_ways.items():
                times[name].append(seconds)
    gradients = [dict(run.gradients()) for run in runs.values()]
    same = all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    for name, seconds in times.items():
        print(f"{name:9} {1e3 * statistics.median(seconds):8.1f} ms a window")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"derived / declared: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} rounds)")
    print(f"gradients have {'the same bits' if same else 'other bits'}")


class Run:
    """A runner over a model, with the family that its name says, and a window for it."""

    def __init__(self, model: Any, name: str, options: argparse.Namespace) -> None:
        self.model = model
        families = registry.REGISTERED
        if name == DERIVED:
            registry.REGISTERED = {}  # so that Llama is derived, too
        config = HelixConfig(tp_size=1, plan="sequential")
        mesh = build_mesh(1, "cpu")
        family = registry.family_of(model)
        assert isinstance(family, DerivedFamily) == (name == DERIVED)
        self.runner = build_runner(model, config, mesh, modes_of(family.layers(model), None, config)).runner
        generator = torch.Generator().manual_seed(1)
        scale = LossScale(torch.tensor(1.0 / (options.microbatches * options.length)))
        maker = WindowMaker(model, mesh)
        ids = [torch.randint(4096, (2, options.length), generator=generator) for _ in range(options.microbatches)]
        self._make = lambda: [
            maker.microbatch({"input_ids": each, "labels": each}, scale, (0, place)) for place, each in enumerate(ids)
        ]
        registry.REGISTERED = families

    def time(self) -> float:
        """Runs a window and returns how long it took, in seconds."""
        self.model.zero_grad()
        start = time.perf_counter()
        self.runner.train_window(self._make())
        return time.perf_counter() - start

    def gradients(self) -> Any:
        return [(name, p.grad) for name, p in self.model.named_parameters()]


if __name__ == "__main__":
    main()
