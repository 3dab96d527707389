"""How long programs and predictions take, by the length of the window.

The layers are those of the paper's Llama-39B on A40 GPUs (`benchmarks.paper`), as many as asked for, in pipelines under
the paper's W schedule. Printed are seconds of a processor for the program of rank 0 and for the prediction of the
window on all ranks. Making the plan itself is not timed; a searched plan is searched hastily. No device is needed.

    python -m benchmarks.planning_time --layers 80 --pp 1 4 16 --microbatches 8 64 512
"""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.common import markdown, options_of
from benchmarks.paper.published import FIGURE_11, WAVELET
from benchmarks.paper.runs import Runs
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.predict import predict
from hf_helix.planning.window.program import build_program

ROW, SCHEDULE = FIGURE_11[2], "folded_1f1b"


def main() -> None:
    options = options_of(
        __doc__, layers=80, pp=[1, 4, 16], microbatches=[8, 64, 512], rules=["sequential", "greedy"]
    ).parse_args()
    runs, rows = Runs(), []
    for pp in options.pp:
        profile = runs.profile(replace(ROW, layers=options.layers, sizes=replace(ROW.sizes, pp=pp)), WAVELET)
        for rule in options.rules:
            few = build_schedule(SCHEDULE, pp, 4)
            plan = make_plan(rule, profile, model="m", mesh={"tp_size": ROW.sizes.tp}, schedule=few, searching=0.05)
            for count in options.microbatches:
                schedule = build_schedule(SCHEDULE, pp, count)
                begin = time.process_time()
                program = build_program(schedule, profile.layout, plan, 0)
                built = time.process_time()
                predict(plan, profile, schedule)
                took = f"{built - begin:.2f}", f"{time.process_time() - built:.2f}"
                rows.append((str(pp), str(count), rule, *took, str(len(program)), str(len(program.once))))
    header = ("pp", "micro-batches", "plan", "program s", "prediction s", "operators", "of them kept")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
