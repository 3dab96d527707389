"""Sharded parameters against stock FSDP2 and DDP, on two hosts joined by a link of a given speed.

Builds two network namespaces as `shaped_link.py` does (needs root) and trains a Llama with data parallelism over two
ranks: stock DDP; FSDP2 as Transformers applies it (`distributed_config` with `fsdp_size=2`), which reduces gradients
once in a window, as the Trainer has it; ours without sharding, with `shard_optimizer=True`, and with
`shard_parameters=True` under `sequential`, `greedy` and `search`, planned with operators that are measured on the link.
Losses of a first window are compared. All are timed in one run, in turn;
medians, the slower rank counts. Computation and communication alone are those of `shard_parameters=True`; the bound is
the larger of both. A step is forward, backward and gradient sums of a window, without the optimizer. With `--bf16`,
all train as under `bf16=True` of the Trainer: weights in fp32, matrix products in bf16.

    sudo python benchmarks/sharded_parameters.py --rates 500 1000 --microbatches 4 8
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import shaped_link

PLAINLY, ONCE = "hf_helix, whole", "shard_optimizer"
PLANS = ("sequential", "greedy", "search")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[500, 1000], help="Mbit/s each way")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8], help="of a window, on each rank")
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", help="train as with bf16=True")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds after which everything is stopped")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--markdown", type=Path, help="also write the tables there, with hardware and versions")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "sequential" not in options.plans:
        parser.error("--plans must name sequential, under which computation and communication are timed alone")
    if options.rank is None:
        shaped_link.run_ranks("network namespaces", 2, shaped_link.start_rank, options.timeout, shaped_link.hosts())
    else:
        work(options)


def work(options: argparse.Namespace) -> None:
    """One rank: every rate and window."""
    import torch.distributed as dist

    shaped_link.join(options.rank)
    bench = Bench(options)
    results = []
    for rate in options.rates:
        shaped_link.shape(options.rank, rate)
        for count in options.microbatches:
            results.append({"rate": rate, "microbatches": count, **bench.measure(rate, count)})
            if options.rank == 0:
                print("\n" + describe(results[-1]), flush=True)
                shaped_link.save(options, results, "Sharded parameters", __doc__ or "", describe, sys.argv[1:-2])
    dist.destroy_process_group()


class Bench:
    """The same Llama five times: DDP, FSDP2; ours whole, with the optimizer spread, with parameters spread."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from stock_models import DDP, FSDP2, build_models
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        self.options = options
        self.autocast_dtype = torch.bfloat16 if options.bf16 else None
        whole = LlamaForCausalLM(shaped_link.llama(options, heads=8)).train()
        folder = Path(tempfile.gettempdir()) / "model"  # see start_rank
        self.stock = build_models(whole, (DDP, FSDP2), 2, folder, options.bf16)
        again, once = (LlamaForCausalLM.from_pretrained(folder).train() for _ in range(2))
        self.plain, self.once = self._cut(again), self._cut(once, shard_optimizer=True)
        self.sharded = self._cut(whole, shard_parameters=True)

    def _cut(self, model: Any, **shards: bool) -> tuple[Any, Any]:
        """Our runner of a model, and what makes its windows."""
        from hf_helix.config import HelixConfig
        from hf_helix.engine.build import RunOptions, build_runner
        from hf_helix.engine.microbatches import WindowMaker
        from hf_helix.planning.graph.recompute import NONE
        from hf_helix.runtime.distributed.mesh import mesh_of

        config = HelixConfig(**shards)
        mesh = mesh_of(config, "cpu")
        run = RunOptions(autocast_dtype=self.autocast_dtype)
        return build_runner(model, config, mesh, [NONE] * self.options.layers, run).runner, WindowMaker(model, mesh)

    def batches(self, count: int) -> list[dict[str, Any]]:
        """The micro-batches of this rank."""
        import torch

        generator = torch.Generator().manual_seed(1 + self.options.rank)
        shape = (self.options.batch, self.options.sequence)
        ids = [torch.randint(0, 4096, shape, generator=generator) for _ in range(count)]
        return [{"input_ids": tokens, "labels": tokens} for tokens in ids]

    def measure(self, rate: int, count: int) -> dict[str, Any]:
        """Measures the operators, makes the plans, times everything in turn."""
        import torch
        from stock_models import DDP, TOLERANCE, StockModel

        from hf_helix.engine.microbatches import LossScale
        from hf_helix.measure.operators import measure_profile
        from hf_helix.measure.overlap import forget_gradients, measure_overlap, time_steps
        from hf_helix.tuning.candidates import plan_runners

        batches, (runner, maker) = self.batches(count), self.sharded
        tokens = count * self.options.batch * (self.options.sequence - 1)
        scale = LossScale(torch.tensor(1.0 / tokens))
        window = [maker.microbatch(batch, scale, (0, place)) for place, batch in enumerate(batches)]
        profile = measure_profile(runner, window, {"link": f"{rate} Mbit/s"})
        ours = plan_runners(runner, self.options.plans, profile, count)
        every = {name: StockModel(model, batches, 1 / count, runner) for name, model in self.stock.items()}
        every |= {PLAINLY: self.plain[0], ONCE: self.once[0], **ours}
        losses = {name: float(sum(each.train_window(window))) for name, each in every.items()}
        most = TOLERANCE[self.autocast_dtype] * losses[DDP]
        if any(abs(loss - losses[DDP]) > most for loss in losses.values()):
            raise RuntimeError(f"losses differ: {losses}")
        for each in (runner, self.plain[0], self.once[0]):
            forget_gradients(each)
        alone = next(iter(measure_overlap({"sequential": ours["sequential"]}, window, 3).values()))
        times = time_steps(every, window, self.options.repeats)
        return {
            "computation": alone.computation,
            "communication": alone.communication,
            "losses": losses,
            "steps": {name: sorted(seconds) for name, seconds in times.items()},
        }


def describe(result: dict[str, Any]) -> str:
    """The table of a rate and a window."""
    from stock_models import DDP, FSDP2

    compute, moved = result["computation"], result["communication"]
    bound = max(compute, moved)
    steps = {name: statistics.median(seconds) for name, seconds in result["steps"].items()}
    lines = [
        f"{result['rate']} Mbit/s, {result['microbatches']} micro-batches on each rank: computation {compute:.2f} s, "
        f"communication of sharded parameters {moved:.2f} s, bound {bound:.2f} s",
        f"  {'':<22} {'step s':>8} {'from':>7} {'to':>7} {'FSDP2 / it':>11} {'bound / it':>11}",
    ]
    for name, seconds in result["steps"].items():
        title = name if name in (DDP, FSDP2, PLAINLY, ONCE) else f"sharded, {name}"
        part = f"{bound / steps[name]:11.2f}" if title != name else f"{'-':>11}"
        step = steps[name]
        lines.append(
            f"  {title:<22} {step:8.2f} {min(seconds):7.2f} {max(seconds):7.2f} {steps[FSDP2] / step:10.2f}x {part}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
