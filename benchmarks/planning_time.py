"""How long programs and predictions take, by the length of the window.

In:   the layers of a model like Llama-39B on A40 GPUs (`paper_rows`), pipeline sizes, micro-batches and rules of plans.
Out:  seconds of a processor for the program of rank 0, and for the prediction of the window on all ranks.
Must hold: no device and no torch is needed. Making the plan itself is not timed; a searched plan is searched hastily.

    python benchmarks/planning_time.py --layers 80 --pp 1 4 16 --microbatches 8 64 512
"""

from __future__ import annotations

import argparse
import time

from paper_rows import ROWS, row_profile

from hf_helix.planning.graph.operator import Graph, Kind, Operator
from hf_helix.planning.graph.pair import RECEIVE, SEND, GraphPair, transfer_graphs
from hf_helix.planning.layout import Layout, place_names
from hf_helix.planning.pipeline.named import PLACEMENT_OF, build_schedule
from hf_helix.planning.pipeline.placement import split_layers, stage_ranks
from hf_helix.planning.plans.registry import make_plan
from hf_helix.planning.predict import predict_seconds
from hf_helix.planning.profile import Profile, named_operators
from hf_helix.planning.program import build_program

ROW = ROWS[8]
ENDS, TRANSFER = 0.02, 0.01  # seconds of an end's operator and of a transfer, in parts of a layer's


def pipeline_profile(num_layers: int, num_ranks: int, schedule: str, contention: float = 1.2) -> Profile:
    """The profile of a pipeline of equal layers with an embedding and a head."""
    known = row_profile(ROW, 1, contention)
    first = Operator(name="lookup", kind=Kind.COMPUTE, reads=(), writes=("x",))
    last = Operator(name="loss", kind=Kind.COMPUTE, reads=("x",), writes=("loss",), splits_dgrad_wgrad=True)
    graphs = {
        "embedding": GraphPair.of(Graph("embedding", (first,), (), ("x",))),
        "layer": known.layout.graphs["layer"],
        "head": GraphPair.of(Graph("head", (last,), ("x",), ("loss",))),
        **transfer_graphs(),
    }
    ranks = stage_ranks(PLACEMENT_OF[schedule], num_ranks)
    layers = split_layers(num_layers, ranks)
    units, chunks = place_names(["embedding", *["layer"] * num_layers, "head"], ranks, layers)
    layout = Layout(units, chunks, graphs, ranks=ranks)
    whole = sum(known.times.values())
    times = {
        name: known.times.get(name, whole * (TRANSFER if name[0] in (SEND, RECEIVE) else ENDS))
        for name, _ in named_operators(layout)
    }
    return Profile({"row": ROW.name}, layout, times, pairs=known.pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--pp", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rules", nargs="+", default=["sequential", "greedy"])
    parser.add_argument("--schedule", default="folded_1f1b", choices=list(PLACEMENT_OF))
    options = parser.parse_args()
    print("| pp | micro-batches | plan | program s | prediction s | operators | of them kept |\n" + "|---:" * 7 + "|")
    for num_ranks in options.pp:
        profile = pipeline_profile(options.layers, num_ranks, options.schedule)
        for rule in options.rules:
            few = build_schedule(options.schedule, num_ranks, 4)
            plan = make_plan(rule, profile, model="m", mesh={"tp_size": ROW.tp}, schedule=few, searching=0.05)
            for count in options.microbatches:
                schedule = build_schedule(options.schedule, num_ranks, count)
                begin = time.process_time()
                program = build_program(schedule, profile.layout, plan, 0)
                built = time.process_time()
                predict_seconds(plan, profile, schedule)
                took = f"{built - begin:.2f} | {time.process_time() - built:.2f}"
                print(f"| {num_ranks} | {count} | {rule} | {took} | {len(program)} | {len(program.once)} |", flush=True)


if __name__ == "__main__":
    main()
