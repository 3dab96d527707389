"""Weight gradients that are held back in the last backward change no bit, and sums begin while it still computes."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.pipeline_jobs import trainer_of, window_of
from support.pipeline_trainer_jobs import buckets_of, with_buckets

from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.plan.list_scheduler import PriorityPlan
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.gradients.reduce import reduce_all_gradients
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams.trace import Trace

LAYERS, MICROBATCHES, LENGTHS = 3, 3, (16, 8, 12)
SMALL = 8_000  # bytes of a bucket: a few parameters
WAYS = (None, 0, 2, LAYERS + 2)
"""Units that hold weight gradients back: none with the last backward ordered like all others, none, some, all."""

# What the ranks run


@plain_parameters()
def held_back(folder: str, frozen: Sequence[str] = ()) -> dict[str, Any]:
    """One window in several ways: its gradients, and by number of units that hold back, traces.

    Args:
        frozen: parameters that are frozen once the layout is made.
    """
    trainer: Any = trainer_of(folder, {}, {"num_hidden_layers": LAYERS})
    window = window_of(trainer, MICROBATCHES, 2, LENGTHS)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    first = with_buckets(trainer.helix.runner, SMALL)
    for name in frozen:
        trainer.model.get_parameter(name).requires_grad_(False)
    plan = make_plan("greedy", rough_profile(first.layout), model=trainer.plan.model, mesh=trainer.plan.mesh)
    assert isinstance(plan, PriorityPlan)

    def gradients() -> dict[str, Any]:
        result = {names[p]: p.grad.numpy().copy() for p in first.rank_units.own_rows if p.grad is not None}
        trainer.model.zero_grad()
        return result

    result: dict[str, Any] = {
        "gradients": {},
        "ran": {},
        "behind": {},
        "early": {},
        "sums": len(first.layout.reductions),
    }
    with buckets_of(SMALL):
        first.train_window(window, complete=False)
        reduce_all_gradients(first.rank_units.units, first.mesh, first.executor.streams)
        result["expected"] = gradients()
        for held in WAYS:
            runner = first.with_plan(
                replace(plan, priorities=replace(plan.priorities, num_units_with_deferred_wgrad=held))
            )
            trace = traced(runner, window)
            result["gradients"][held] = gradients()
            result["ran"][held] = [label for verb, label in trace.events if verb == "run"]
            result["behind"][held] = computations_behind(trace)
            result["early"][held] = begun_before_the_end(trace)
    first.executor.streams.close()
    return result


def traced(runner: Runner, window: Any) -> Trace:
    """A window's trace, which also notes where sums are issued. The last computation begins once the first sum that was
    issued before it is over: what is recorded does not depend on how fast anything ran."""
    streams: Any = runner.executor.streams
    issue, compute, issued = streams.issue, streams.compute, []
    program = [(each, each.operator) for each in runner.program(MICROBATCHES).once]
    computing = [(each, op) for each, op in program if op is not None and not op.kind.communicates]
    last, operator = computing[-1]
    label_of_last = runner.executor.label(last.microbatch, last.unit, operator)
    streams.trace = trace = Trace()

    def noted(kind: Kind, work: Any, after: Any, label: str, lane: str = "") -> Any:
        event = issue(kind, work, after, label, lane)
        if kind is Kind.GRADIENTS:
            trace.note("sum", label)
            issued.append(event)
        return event

    def late(work: Any, label: str) -> Any:
        deadline = time.monotonic() + 60
        while label == label_of_last and issued and not streams.is_over(issued[0]):
            assert time.monotonic() < deadline, "the first sum waits for the last computation"
            time.sleep(1e-3)
        return compute(work, label)

    streams.issue, streams.compute = noted, late
    try:
        runner.train_window(window)
    finally:
        streams.trace = None
        del streams.issue, streams.compute
    return trace


def computations_behind(trace: Trace) -> list[int]:
    """Of every sum, how many computations were issued after it."""
    verbs = [verb for verb, _ in trace.events]
    return [verbs[place:].count("run") for place, verb in enumerate(verbs) if verb == "sum"]


def begun_before_the_end(trace: Trace) -> int:
    """How many sums had begun, by the times of the trace, when the last computation ended."""
    end = max(span.end for span in trace.spans if span.stream == Kind.COMPUTE.value)
    return sum(span.start < end for span in trace.spans if span.stream == Kind.GRADIENTS.value)


# Tests


def test_weight_gradients_are_held_back(cluster_of: Any, tmp_path: Path) -> None:
    """No bit changes against sums that are issued behind everything; sums begin before the last backward ends, in the
    recorded order and by the recorded start; the units that hold weight gradients back, and no others, run them behind
    the embedding."""
    ranks = cluster_of(2).run(held_back, folder=str(tmp_path))
    for rank in ranks:
        assert rank["sums"] > LAYERS
        for held in WAYS:
            assert_same_bits(rank["gradients"][held], ranks[0]["expected"], held)
            assert len(rank["behind"][held]) == rank["sums"]
            assert rank["behind"][held][0] > 0
            assert rank["early"][held] >= 1
        for held in (0, 2):  # the head's sum, which no other unit's weight gradients keep waiting
            assert rank["behind"][held][0] > 10
        late = {held: weights_behind_the_embedding(ran, f"B{MICROBATCHES - 1}.") for held, ran in rank["ran"].items()}
        assert late[0] == set()
        assert late[2] == {"layers.0"}
        assert late[LAYERS + 2] > late[2]


def weights_behind_the_embedding(ran: Sequence[str], last: str) -> set[str]:
    """The units whose weight gradients of the last micro-batch ran after the gradient of the embedding."""
    embedding = max(place for place, label in enumerate(ran) if label.startswith(f"{last}embedding"))
    late = [label for label in ran[embedding:] if label.startswith(last) and label.endswith(".W")]
    return {".".join(label.split(".")[1:3]) if ".layers." in label else label.split(".")[1] for label in late}


def test_what_is_frozen_after_the_layout_was_made_is_summed_at_the_end(cluster_of: Any, tmp_path: Path) -> None:
    """There are other buckets then than in the program, and none may be summed before it is complete."""
    frozen = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
    for rank in cluster_of(2).run(held_back, folder=str(tmp_path), frozen=frozen):
        assert not set(frozen) & rank["expected"].keys()
        for held in WAYS:
            assert_same_bits(rank["gradients"][held], rank["expected"], held)
            assert set(rank["behind"][held]) == {0}


def assert_same_bits(gradients: dict[str, Any], expected: dict[str, Any], held: int | None) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, expected[name], err_msg=f"{name}, {held} units hold back")
