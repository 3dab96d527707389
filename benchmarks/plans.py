"""What each plan makes of a slow link, and what stock software makes of it: step times in one run, beside the bound.

Cuts a model over ranks that a slow link joins. The operators are measured on the link and plans are made with these
times, as `plan="auto"` does. Then windows under every plan are timed in turn, after computation alone and communication
alone; medians, the slowest rank counts. The bound is the larger of the two alone (of communication, the busiest link).
A step is forward, backward and gradient reduction of a window, without the optimizer. The link is emulated in the
process (docs/results.md: a transfer takes place, and waits, asleep, until such a link would have carried it), or,
with `--rates`, joins two network namespaces, over which stock software runs, too (needs root). The studies:

    tp         a Llama with tp_size=2 under every plan, with `--tiles` also the paper's intra-batch baseline; with
               `--rates` beside Transformers' tensor parallelism and DDP
    dp         replicas: DDP and FSDP2 (with `--rates`), ours whole, with shard_optimizer, with shard_parameters
    cp         a sequence on two ranks: what each kind of overlap adds (the paper's figure 15)
    ep         the experts of a Phi-MoE on two ranks, beside all experts on both
    recompute  none, selective and full under each plan: time and peak memory

With `--model qwen3_next`, the decoder of any study has as many recurrent layers as layers with attention.

    python -m benchmarks.plans tp --links even 150mbit --microbatches 16
    python -m benchmarks.plans cp --links even --microbatches 8 --hidden 256 --heads 4 --batch 1 --model qwen3_next
    python -m benchmarks.plans tp --links even --microbatches 8 --dp_size 2
    sudo env "PATH=$PATH" python -m benchmarks.plans tp --rates 300 500 1000 --microbatches 16
    sudo env "PATH=$PATH" python -m benchmarks.plans dp --rates 1000 --microbatches 4 8 --hidden 512
    sudo env "PATH=$PATH" python -m benchmarks.plans cp --rates 200 --sequence 2048 --batch 1 --hidden 512 \\
        --tp_size 2 --local_rate 1500
    sudo env "PATH=$PATH" python -m benchmarks.plans ep --rates 300 --sequence 512 --batch 1 --hidden 512 \\
        --layers 3 --microbatches 8
"""

import argparse
import contextlib
import copy
import functools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import add_outputs, columns, llama, options_of, save
from benchmarks.ranks import DEVICES, Ranks, shape
from hf_helix.config import CP_RECURRENCES, RULES

EVEN = "even"
TILED = "sequential, in tiles"
STUDIES = ("tp", "dp", "cp", "ep", "recompute")
MODES = ("none", "selective", "full")
VOCABULARY = 4096
FREEDOMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "nothing beside anything": ("sequential", ("intra_node", "inter_node", "comm_beside_comm", "wgrad")),
    "one strand": ("sequential", ()),
    "+ tp overlap": ("search", ("inter_node", "comm_beside_comm", "wgrad")),
    "+ cp overlap": ("search", ("comm_beside_comm", "wgrad")),
    "+ both at once": ("search", ("wgrad",)),
    "+ weight gradients": ("search", ()),
}
"""Rows of the study `cp`: the rule, and what its plans must not use (`benchmarks.paper.ablate`)."""


@dataclass(frozen=True)
class Contender:
    """A row of the table.

    Attributes:
        name: of the row.
        helix: options of `HelixConfig`.
        rule: of its plan.
        without: what the plan must not use.
    """

    name: str
    rule: str = "sequential"
    helix: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def main() -> None:
    options = read_options()
    count = 2 * options.tp_size if options.study == "cp" else options.tp_size * options.dp_size
    hosts = [2 * rank // count for rank in range(count)] if options.rates else None  # neighbours are on one host
    ranks = Ranks(count, hosts, seconds=options.timeout)
    ranks.run(functools.partial(work, ranks), options)


def read_options() -> argparse.Namespace:
    parser = options_of(
        __doc__, microbatches=[16], batch=2, sequence=256, hidden=1024, layers=4, heads=16, repeats=3, timeout=3 * 3600
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--model", choices=("llama", "qwen3_next"), default="llama", help="in ep, llama is a Phi-MoE")
    parser.add_argument("--links", nargs="+", help="emulated links, as of HelixConfig(link=...) (default: even)")
    parser.add_argument("--rates", nargs="+", help=f"Mbit/s between two hosts, or `{EVEN}`; needs root")
    parser.add_argument("--plans", nargs="+", choices=RULES, help="the rules that are compared")
    parser.add_argument("--tiles", action="store_true", help="in tp, also `sequential` with collectives in tiles")
    parser.add_argument("--tp_size", type=int, help="ranks that share every layer (default: 2 for tp and recompute)")
    parser.add_argument("--dp_size", type=int, help="replicas of these ranks (default: 2 for dp and ep)")
    parser.add_argument("--local_rate", type=int, help="Mbit/s inside a host")
    parser.add_argument("--experts", type=int, default=16, help="of a layer, in the study ep")
    parser.add_argument("--capacity", type=float, help="expert_capacity_factor; without it no token is dropped")
    parser.add_argument("--cp_recurrence", choices=CP_RECURRENCES, default="heads", help="in cp, with qwen3_next")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16 over weights in fp32")
    parser.add_argument("--profile", help="also save profiles, such as link-{link}.json")
    add_outputs(parser)
    options = parser.parse_args()
    if options.links and options.rates:
        parser.error("--links are emulated and --rates are between hosts; give one of them")
    options.links = options.links or ([] if options.rates else [EVEN])
    options.tp_size = options.tp_size or (2 if options.study in ("tp", "recompute") else 1)
    options.dp_size = options.dp_size or (2 if options.study in ("dp", "ep") else 1)
    if options.study == "tp" and options.rates and min(options.microbatches) < 2:
        parser.error("--microbatches: DDP needs a micro-batch for each rank, so two or more")
    if options.study in ("tp", "dp") and options.rates and options.tp_size * options.dp_size != 2:
        parser.error("--rates has stock software on two ranks beside; more ranks run on emulated links: --links even")
    return options


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Returns the rows of a study; computation and communication alone are those of the first one's layout."""
    tp = {"tp_size": options.tp_size}
    if options.study == "tp":
        plans = options.plans or RULES
        tiled = [Contender(TILED, helix=tp)] if options.tiles else []
        return [*(Contender(rule, rule, tp) for rule in dict.fromkeys(("sequential", *plans))), *tiled]
    if options.study == "dp":
        plans = options.plans or ("sequential", "greedy", "search")
        spread = [Contender(f"shard_parameters, {rule}", rule, {**tp, "shard_parameters": True}) for rule in plans]
        once = Contender("shard_optimizer", helix={**tp, "shard_optimizer": True})
        return [*spread, Contender("whole", helix=tp), once]
    if options.study == "cp":
        helix = {**tp, "cp_size": 2, "cp_recurrence": options.cp_recurrence, "inter_node_axes": ("cp",)}
        alone = ("+ tp overlap", "+ both at once") if options.tp_size == 1 else ()
        rows = [(name, *row) for name, row in FREEDOMS.items() if name not in alone]
        return [Contender(name, rule, helix, without) for name, rule, without in rows]
    if options.study == "ep":
        helix = {**tp, "ep_size": 2, "expert_capacity_factor": options.capacity, "inter_node_axes": ("ep",)}
        plans = dict.fromkeys(("sequential", *(options.plans or RULES)))
        alone = Contender("all experts on both", helix={**tp, "expert_capacity_factor": options.capacity})
        return [*(Contender(rule, rule, helix) for rule in plans), alone]
    plans = options.plans or ("sequential", "dhelix", "search")
    return [Contender(f"{mode}, {rule}", rule, {**tp, "recompute": mode}) for mode in MODES for rule in plans]


def model_of(options: argparse.Namespace) -> Any:
    """Returns a model with random weights, the same on every rank."""
    import torch
    from transformers import LlamaForCausalLM, PhimoeConfig, PhimoeForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": options.sequence,
    }
    torch.manual_seed(0)
    width = 25 * options.hidden // 16
    if options.model == "qwen3_next":
        head_dim = options.hidden // options.heads
        recurrent = {"linear_num_key_heads": options.heads, "linear_num_value_heads": options.heads}
        recurrent |= {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim, "head_dim": head_dim}
        kinds = {"layer_types": ["linear_attention", "full_attention"] * (options.layers // 2)}
        experts = {"num_experts": options.experts if options.study == "ep" else 0, "num_experts_per_tok": 2}
        experts |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
        alike = {"intermediate_size": options.hidden * 11 // 4, "num_key_value_heads": options.heads}
        return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **recurrent, **kinds, **experts, **alike)).train()
    if options.study == "ep":
        experts = {"num_local_experts": options.experts, "pad_token_id": 0, "num_key_value_heads": options.heads // 4}
        return PhimoeForCausalLM(PhimoeConfig(**sizes, **experts, intermediate_size=width)).train()
    length = {"max_position_embeddings": options.sequence}
    return LlamaForCausalLM(llama(options.hidden, options.layers, VOCABULARY, options.heads, **length)).train()


def work(ranks: Ranks, options: argparse.Namespace) -> None:
    """One rank: every link and window, every row."""
    import torch.distributed as dist

    bench, host = Bench(options), ranks.hosts[options.rank] if ranks.hosts else 0
    if options.local_rate and ranks.is_first_of_host(options.rank):
        shape(host, options.local_rate, "lo")
    tried = {count: bench.try_stock(count) for count in options.microbatches}  # while the link is fast
    results: list[dict[str, Any]] = []
    for link in options.links or options.rates:
        for count in options.microbatches:
            if options.rates:
                rate = bench.even_rate(count) if link == EVEN else int(link)
                dist.barrier()
                if ranks.is_first_of_host(options.rank):
                    shape(host, rate)
                dist.barrier()
                text = f"{rate} Mbit/s"
            else:
                text = bench.emulate(link, count)
            results.append({"link": text, "microbatches": count, "tried": tried[count], **bench.measure(text, count)})
            if options.rank == 0:
                print("\n" + describe(results[-1]), flush=True)
                title = f"Plans and links: {options.study}"
                save(options, title, __doc__, "\n\n".join(map(describe, results)), results)


class Cut:
    """A model that is cut as `HelixConfig` says, and windows for it."""

    def __init__(self, model: Any, helix: Mapping[str, Any], options: argparse.Namespace) -> None:
        import torch

        from hf_helix.config import HelixConfig
        from hf_helix.engine.cut.build import RunOptions, cut_units, start_runner
        from hf_helix.engine.cut.microbatches import WindowMaker
        from hf_helix.engine.cut.recompute import modes_of
        from hf_helix.models.registry import family_of
        from hf_helix.runtime.distributed.mesh import mesh_of

        config = HelixConfig(**helix, link=options.links[0] if options.links else None)
        self.model, self.mesh = model, mesh_of(config, "cpu")
        modes = modes_of(family_of(model).layers(model), None, config)
        run = RunOptions(autocast_dtype=torch.bfloat16 if options.bf16 else None)
        self.maker = WindowMaker(model, self.mesh)
        cut = cut_units(model, config, self.mesh, modes, autocast_dtype=run.autocast_dtype)
        self.runner = start_runner(model, cut.rank_units, config, self.mesh, run)

    def window(self, batches: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Returns micro-batches as the runner takes them."""
        import torch

        from hf_helix.engine.cut.microbatches import LossScale

        ids = batches[0]["input_ids"]
        scale = LossScale(torch.tensor(1.0 / (len(batches) * len(ids) * (ids.shape[1] - 1))))
        return [self.maker.microbatch(batch, scale, (0, place)) for place, batch in enumerate(batches)]


class Bench:
    """The same model, cut once for each layout of a study, and the stock software beside it."""

    def __init__(self, options: argparse.Namespace) -> None:
        from benchmarks.stock_models import DDP, FSDP2, NATIVE_TP, build_models

        self.options = options
        self.rows = contenders(options)
        whole = model_of(options)
        names = {"tp": (NATIVE_TP, DDP), "dp": (DDP, FSDP2)}.get(options.study, ()) if options.rates else ()
        folder = Path(tempfile.gettempdir()) / "model"  # all ranks see it, see `Ranks`
        self.stock = build_models(whole, names, 2, folder, options.bf16) if names else {}
        self.cuts: list[tuple[Mapping[str, Any], Cut]] = []
        for row in self.rows:
            if all(row.helix != helix for helix, _ in self.cuts):
                self.cuts.append((row.helix, Cut(copy.deepcopy(whole), row.helix, options)))
        self.first = self.cuts[0][1]

    def cut_of(self, row: Contender) -> Cut:
        """Returns the model that a row trains."""
        return next(cut for helix, cut in self.cuts if helix == row.helix)

    def batches(self, count: int) -> list[dict[str, Any]]:
        """Returns the micro-batches of a window."""
        import torch

        generator, size = torch.Generator().manual_seed(1), (self.options.batch, self.options.sequence)
        ids = [torch.randint(0, VOCABULARY, size, generator=generator) for _ in range(count)]
        return [{"input_ids": tokens, "labels": tokens} for tokens in ids]

    def stock_models(self, count: int) -> dict[str, Any]:
        """Returns what trains a window with stock software: DDP shares the micro-batches of `tp` out."""
        from benchmarks.stock_models import DDP, StockModel

        batches, models = self.batches(count), {}
        for name, model in self.stock.items():
            shares = name == DDP and self.options.study == "tp"
            mine = batches[self.options.rank :: 2] if shares else batches
            models[name] = StockModel(model, mine, 1 / len(mine), self.first.runner)
        return models

    def try_stock(self, count: int) -> dict[str, dict[str, float]]:
        """Returns loss, gradient and MiB sent of a window of each; raises where they do other work than ours."""
        from benchmarks.stock_models import try_windows

        if not self.stock:
            return {}
        cut = self.first if self.options.study == "tp" else self.cut_of(Contender("whole", helix={"tp_size": 1}))
        window = cut.window(self.batches(count))
        device = DEVICES[self.options.rank]
        return try_windows(cut.runner, cut.model, self.stock_models(count), window, device)

    def even_rate(self, count: int) -> int:
        """Returns the Mbit/s at which communication takes as long as computation."""
        from hf_helix.measure.overlap import measure_overlap

        overlap = measure_overlap({"": self.first.runner}, self.first.window(self.batches(count)), 1)[""]
        return round(8 * (overlap.bytes_moved + overlap.bytes_summed) / overlap.computation / 1e6)

    def emulate(self, link: str, count: int) -> str:
        """Sets the speed of the emulated link and returns it as text."""
        from hf_helix.config import parse_link
        from hf_helix.tuning.candidates import calibrate_link

        links = [cut.mesh.link for _, cut in self.cuts]
        rate = parse_link(link).rate
        for each in links:
            each.rate = rate
        if rate is None:
            calibrate_link(self.first.runner, self.first.window(self.batches(min(4, count))))
            rate = links[0].rate
            for each in links:
                each.rate = rate
        return f"{rate / 1e6:.0f} Mbit/s{' (even)' if link == EVEN else ''}, emulated"

    def measure(self, link: str, count: int) -> dict[str, Any]:
        """Measures the operators, makes the plans, times everything in turn."""
        from benchmarks.paper.ablate import ablate_profile, ablated
        from benchmarks.paper.tiled_units import in_tiles
        from benchmarks.paper.tiles import tile_profile
        from hf_helix.measure.memory import peak_bytes
        from hf_helix.measure.operators import measure_profile
        from hf_helix.measure.overlap import measure_overlap
        from hf_helix.operators.communication.emulated_link import bare
        from hf_helix.planning.timing.profile_file import save_profile
        from hf_helix.runtime.distributed.agreement import all_gather_object
        from hf_helix.runtime.runner import forget_gradients
        from hf_helix.tuning.candidates import plan_runners, predict_window

        options, batches = self.options, self.batches(count)
        rows: dict[str, dict[str, Any]] = {}
        runners: dict[str, Any] = {}
        windows: dict[str, Any] = {}
        for helix, cut in self.cuts:
            mine, window = [row for row in self.rows if row.helix == helix], cut.window(batches)
            profile = measure_profile(cut.runner, window[:4], {"link": link})
            if options.profile and options.rank == 0 and cut is self.first:
                save_profile(profile, options.profile.format(link=link.split()[0], microbatches=count))
            made = {}
            for row in mine:
                base = ablated(cut.runner, row.without) if row.without else cut.runner
                known = ablate_profile(profile, row.without)
                if row.name == TILED:
                    base, known = in_tiles(cut.runner, options.tp_size), tile_profile(profile, options.tp_size)
                made[row.name] = plan_runners(base, [row.rule], known, count)[row.rule]
                rows[row.name] = {"predicted": predict_window(made[row.name], known, count)}
            for name, overlap in measure_overlap(made, window, max(1, options.repeats // 2)).items():
                peak = max(all_gather_object(peak_bytes(made[name], window)))
                alone = {"computation": overlap.computation, "communication": overlap.communication}
                rows[name] |= {**alone, "bound": overlap.bound, "overlapped": overlap.overlapped_fraction, "peak": peak}
            runners |= made
            windows |= dict.fromkeys(made, window)
            forget_gradients(cut.runner)
        runners |= self.stock_models(count)
        for name, seconds in time_all(runners, windows, options.repeats).items():
            rows.setdefault(name, {})["steps"] = seconds
        if options.links:
            with contextlib.ExitStack() as stack:
                for _, cut in self.cuts:
                    stack.enter_context(bare(cut.mesh.link))
                for name, seconds in time_all(runners, windows, options.repeats).items():
                    rows[name]["bare"] = statistics.median(seconds)
        return {"rows": rows, "auto": self.automatic(rows)}

    def automatic(self, rows: Mapping[str, Mapping[str, Any]]) -> str:
        """Returns the rule that `auto` would keep of those timed here: the fastest of the most promising ones."""
        from hf_helix.tuning.budget import BASELINE, CANDIDATES, FULL

        if self.options.study != "tp":
            return ""
        promising = sorted((rule for rule in CANDIDATES if rule in rows), key=lambda rule: rows[rule]["predicted"])
        timed = {BASELINE, *[rule for rule in promising if rule != BASELINE][: FULL.timed]}
        return min(timed, key=lambda rule: statistics.median(rows[rule]["steps"]))


def time_all(runners: Mapping[str, Any], windows: Mapping[str, Any], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of every round by name, all in turn, each window begun without gradients. Collective."""
    from hf_helix.measure.overlap import time_in_turn
    from hf_helix.runtime.runner import forget_gradients

    def train(name: str) -> None:
        forget_gradients(runners[name])
        runners[name].train_window(windows.get(name))

    first = next(iter(runners.values()))
    times = time_in_turn([lambda name=name: train(name) for name in runners], first, repeats)
    for runner in runners.values():
        forget_gradients(runner)
    return dict(zip(runners, times, strict=True))


def describe(result: Mapping[str, Any]) -> str:
    """Returns the table of a link and a window."""
    rows, cells = result["rows"], []
    first = next(iter(rows.values()))
    base = statistics.median(rows.get("one strand", first)["steps"])
    for name, row in rows.items():
        step = statistics.median(row["steps"])
        line = [name, f"{step:.3f}", f"{min(row['steps']):.3f}", f"{max(row['steps']):.3f}", f"{base / step:.2f}x"]
        if "bound" in row:
            hidden = 1 - max(0.0, step - row["computation"]) / row["communication"] if row["communication"] else 0.0
            line += [f"{row['predicted']:.3f}", f"{row['bound'] / step:.2f}", f"{100 * hidden:.0f}"]
            line += [f"{100 * row['overlapped']:.0f}", f"{row['peak'] / 1e6:.1f}"]
        cells.append([*line, *[""] * (10 - len(line)), f"{row['bare']:.3f}" if "bare" in row else ""])
    header = ["", "step s", "from", "to", "gain", "predicted", "of bound", "hidden %", "overlapped %", "peak MB"]
    lines = [
        f"{result['link']}, {result['microbatches']} micro-batches: computation {first['computation']:.2f} s, "
        f"communication {first['communication']:.2f} s, bound {first['bound']:.2f} s",
        columns([*header, "no link s"], cells),
    ]
    if result["auto"]:
        lines.append(f"auto keeps {result['auto']}")
    lines += [
        f"{name}: mean loss {row['loss']:.4f}, {row['sent']:.0f} MiB sent by a rank"
        for name, row in result["tried"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
