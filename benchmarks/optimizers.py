"""The time of Muon's step: each matrix on one rank, next to every matrix on every rank.

Cuts a Llama over `tp 2 x dp 2` on emulated links, and steps the matrices of its layers with torch's Muon in two ways,
in alternation: hf_helix gathers each matrix to one of four ranks, which orthogonalizes it, and scatters the result; the
other way gathers the gradient of every matrix on every rank, orthogonalizes it there, and keeps this rank's slice. Both
communicate for other matrices while they compute for one. Both get the same weights. Medians of the slowest rank.

    python -m benchmarks.optimizers
"""

import argparse
import statistics
import time
from collections.abc import Callable
from math import prod
from typing import Any

from benchmarks.common import add_outputs, columns, facts, llama, options_of, save
from benchmarks.ranks import Ranks

HEADER = ("link", "parameters of matrices", "one rank, s", "every rank, s", "ratio", "largest difference")


def main() -> None:
    parser = options_of(__doc__, links=["500mbit"], hidden=384, layers=4, repeats=5)
    add_outputs(parser)
    Ranks(count=4, pins=False).run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank: both ways on every link."""
    rows = [measure(link, options) for link in options.links]
    if options.rank == 0:
        text = columns(HEADER, [[str(cell) for cell in row] for row in rows])
        print(f"{facts()}\n{text}", flush=True)
        save(options, "Muon's step over tp 2 x dp 2", __doc__, text, rows)


def measure(link: str, options: argparse.Namespace) -> list[Any]:
    """Returns the row of a link."""
    import torch
    import torch.distributed as dist

    from hf_helix.config import HelixConfig
    from hf_helix.engine.matrix_steps import MatrixStep
    from hf_helix.engine.optimizer_shards import step_shards
    from hf_helix.engine.synthetic import Workload
    from hf_helix.runtime.divided import plain_parameters

    made = Workload(llama(options.hidden, options.layers), HelixConfig(tp_size=2, link=link), torch.device("cpu"))
    rank_units, mesh, streams = made.runner.rank_units, made.mesh, made.runner.executor.streams
    parts = rank_units.parts(mesh.place)
    generator = torch.Generator().manual_seed(mesh.tp.rank)  # replicas have equal slices
    with plain_parameters():
        matrices = [each for each, part in parts.items() if each.dim() == 2 and ".layers." in part.row.name]
        for matrix in matrices:
            matrix.data = torch.randn(matrix.shape, generator=generator) * 0.02
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        start = [matrix.detach().clone() for matrix in matrices]
        ours, theirs = torch.optim.Muon(matrices), OnEveryRank(matrices, rank_units.own_rows, mesh, streams)
        step_shards(ours, rank_units, streams, reads_matrices=True)
        MatrixStep.install(ours, parts, mesh, streams)
        results = []
        for step in (ours.step, theirs.step):
            for matrix, before in zip(matrices, start, strict=True):
                matrix.data.copy_(before)
            step()
            results.append([matrix.detach().clone() for matrix in matrices])
        differences = [(one - other).abs().max() / other.abs().max() for one, other in zip(*results, strict=True)]
        times = [[seconds_of(step) for step in (ours.step, theirs.step)] for _ in range(options.repeats)]
        slowest = torch.tensor(times)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        one, every = (statistics.median(column) for column in slowest.T.tolist())
        count = sum(prod(part.row.shape) for each, part in parts.items() if each in set(matrices))
    return [link, count, f"{one:.3f}", f"{every:.3f}", f"{one / every:.2f}", f"{max(differences):.1e}"]


def seconds_of(step: Callable[[], Any]) -> float:
    """Returns the seconds of a step that all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


class OnEveryRank:
    """Muon with every full matrix on every rank: gradients are gathered, one matrix ahead of the computation; averages
    are full, weights are slices."""

    def __init__(self, matrices: Any, rows: Any, mesh: Any, streams: Any) -> None:
        import torch

        self._matrices, self._rows, self._mesh, self._streams = matrices, rows, mesh, streams
        self._options = torch.optim.Muon([torch.nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
        self._averages: dict[Any, Any] = {}

    def step(self) -> None:
        """Steps all matrices."""
        import torch
        from torch.optim import _muon as muon

        from hf_helix.operators.parameters.parts import cut_tensor

        group = self._options
        with torch.no_grad():
            pending = self._gathered(0)
            for number, matrix in enumerate(self._matrices):
                wait, pending = pending, self._gathered(number + 1)
                gradient, cut = wait(), self._rows[matrix].cut
                average = self._averages.setdefault(matrix, torch.zeros_like(gradient))
                average.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(average, group["momentum"])
                update = muon._zeropower_via_newtonschulz(
                    update, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                axis = self._mesh.axis_of(cut)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                rate = muon._adjust_lr(group["lr"], group["adjust_lr_fn"], gradient.shape)
                matrix.add_(cut_tensor(update, cut, axis.size, axis.rank), alpha=-rate)

    def _gathered(self, number: int) -> Callable[[], Any]:
        """Starts to gather the gradient of a matrix; returns the function that waits for it."""
        import torch

        from hf_helix.operators.parameters.parts import paste

        if number == len(self._matrices):
            return lambda: None
        gradient, cut = self._matrices[number].grad, self._rows[self._matrices[number]].cut
        axis = self._mesh.axis_of(cut)
        parts = torch.empty(axis.size, *gradient.shape)
        transfer = lambda: axis.transport.all_gather(parts.flatten(0, 1), gradient)  # noqa: E731
        event = self._streams.issue(axis.kind, transfer, (), "gather")

        def wait() -> Any:
            self._streams.wait(event)
            full = torch.empty(cut.full_shape(gradient.shape))
            for rank, part in enumerate(parts):
                paste(full, part, cut, axis.size, rank)
            return full

        return wait


if __name__ == "__main__":
    main()
