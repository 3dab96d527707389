"""Steps on paper: the quick prediction of a window against every operator of it, and what follows from a step."""

from dataclasses import replace
from typing import Any

import pytest
from support.marks import slow
from support.simulated import LLAMA, case_of, cluster_with, on_meta

from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import is_replayed, layout_of, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.choice import auto
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.rules import dhelix
from hf_helix.planning.timing.cluster import Cluster

# A network on which communication takes about as long as computation.
CLUSTER = cluster_with(
    nodes=2,
    devices_per_node=2,
    device={"kernel_us": 2},
    node={"gb_per_s": 2, "latency_us": 5},
    network={"gb_per_s": 1, "latency_us": 10},
    contention={"compute_beside_intra_node": 1.1, "intra_node_beside_compute": 1.1},
)
SIZES: dict[str, dict[str, Any]] = {
    "tp2 dp2": {"tp": 2, "dp": 2},
    "cp2 dp2": {"cp": 2, "dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp4": {"pp": 4},
    "dp4 sharded": {"dp": 4, "shard_parameters": True},
    "tp2 dp2 sharded": {"tp": 2, "dp": 2, "shard_parameters": True},
    "pp2 dp2 sharded": {"pp": 2, "dp": 2, "shard_parameters": True},
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and schedules need not be good."""
    monkeypatch.setattr(dhelix, "MAX_STATES", 100)
    monkeypatch.setattr(auto, "TRIALS", 2000)


@pytest.fixture(scope="module")
def paper() -> SimulatedModel:
    return SimulatedModel(on_meta(num_hidden_layers=8), CLUSTER)


def step_of(
    paper: SimulatedModel, whole: bool = False, cluster: Cluster = CLUSTER, quick: bool = False, **case: Any
) -> Any:
    wanted = case_of(**case)
    fidelity = Fidelity.DRAWN if whole else Fidelity.QUICK if quick else Fidelity.WHOLE
    return simulate_step(paper.amounts(wanted), wanted, cluster, fidelity)


MICROBATCHES = {1: 8, 2: 14, 4: 12}
"""By ranks of a pipeline; up to two, more than the quick prediction looks at."""


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((name, "sequential") for name in ("tp2 dp2", "pp4", "tp2 dp2 sharded")),
        *((name, "greedy") for name in ("tp2 dp2", "tp2 pp2", "pp2 dp2 sharded")),
        *(slow(name, "dhelix") for name in ("cp2 dp2", "pp2 dp2", "dp4 sharded")),
    ],
)
def test_the_quick_window_is_near_the_whole_one(name: str, plan: str, paper: SimulatedModel):
    case = {**SIZES[name], "plan": plan, "schedule": "folded_1f1b"}
    case["microbatches"] = MICROBATCHES[case.get("pp", 1)]
    quick, whole = (step_of(paper, whole, quick=not whole, **case) for whole in (False, True))
    assert whole.drawn is not None
    assert quick.drawn is None
    assert quick.window == pytest.approx(whole.window, rel=0.05)
    result, expected = (
        step.memory.activations + (step.memory.copies if "sharded" in name else 0) for step in (quick, whole)
    )
    most = 1.25 if plan == "dhelix" else 1.2  # of a pipeline with sharded parameters, 1.24
    assert 0.95 <= result / expected <= most, "rather too much than too little"


@pytest.mark.parametrize("runs_ahead", [True, False], ids=["GPU", "CPU"])
def test_memory_does_not_depend_on_whether_the_window_is_drawn(runs_ahead: bool, paper: SimulatedModel):
    """What collectives hold does, and on CPUs they hold it until they are over."""
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, host_runs_ahead=runs_ahead))
    case = case_of(tp=2, dp=2, microbatches=4)
    amounts = paper.amounts(case)
    drawn, predicted = (simulate_step(amounts, case, cluster, each) for each in (Fidelity.DRAWN, Fidelity.WHOLE))
    assert drawn.drawn is not None
    assert predicted.drawn is None
    assert drawn.memory == predicted.memory


def test_a_schedule_that_is_searched_takes_and_keeps_about_what_usual_ones_do(paper: SimulatedModel):
    quick, whole = (step_of(paper, whole, quick=not whole, pp=4, microbatches=12) for whole in (False, True))
    assert quick.window == pytest.approx(whole.window, rel=0.08), "a search gains up to 6 % here"
    assert 0.94 <= quick.memory.activations / whole.memory.activations <= 1.25


def test_a_long_window_is_a_short_one_with_more_of_the_same(paper: SimulatedModel):
    long, whole = (step_of(paper, each, tp=2, dp=2, microbatches=20) for each in (False, True))
    assert long.window == pytest.approx(whole.window, rel=0.05)


def test_two_strands_hide_what_one_exposes(paper: SimulatedModel):
    one, two = (step_of(paper, plan=plan, **SIZES["tp2 dp2"]) for plan in ("sequential", "greedy"))
    assert two.window < one.window
    assert two.exposed[Kind.INTRA_NODE] < one.exposed[Kind.INTRA_NODE] <= one.loads[Kind.INTRA_NODE] * 1.001
    assert one.window == pytest.approx(one.loads[Kind.COMPUTE] + one.exposed[Kind.INTRA_NODE], rel=0.02)


def test_figures_of_a_step_agree(paper: SimulatedModel):
    step = step_of(paper, tp=2, dp=2, microbatches=6, batch=2)
    assert step.case.tokens == 2 * 2 * 64 * 6
    assert step.seconds == step.window + step.sums + step.optimizer
    assert step.tokens_per_second == pytest.approx(step.case.tokens / step.seconds)
    layers = 8 * (64 * 16 * 8 + 64 * 64 + 3 * 64 * LLAMA["intermediate_size"])
    linear = 6 * (layers + 64 * LLAMA["vocab_size"]) * step.case.tokens / 4
    attention = 6 * 2 * 8 * 64 * step.case.length * step.case.tokens / 4
    assert step.model_flops == pytest.approx((linear + attention / 2, linear + attention))
    assert step.tflops == pytest.approx([each / step.seconds / 1e12 for each in step.model_flops])


def test_data_parallel_copies_cost_their_sums_alone(paper: SimulatedModel):
    one, two = step_of(paper, tp=2), step_of(paper, tp=2, dp=2)
    assert one.window == two.window
    assert one.sums == 0.0 < two.sums
    assert one.memory.buffers == 0 < two.memory.buffers
    sharded = step_of(paper, tp=2, dp=2, shard_optimizer=True)
    assert sharded.memory.states == two.memory.states / 2
    assert step_of(paper, shard_optimizer=True).memory == step_of(paper).memory


@pytest.mark.parametrize("plan", ["sequential", "greedy"])
def test_a_whole_window_has_its_sums(plan: str, paper: SimulatedModel) -> None:
    """Sum by sum, on a stream of their own; what shows behind the last computation is little more than the last."""
    step = step_of(paper, True, tp=2, dp=2, microbatches=4, plan=plan)
    assert step.drawn is not None
    program, timeline = step.drawn
    sums = [made.unit for made in program if made.is_traffic]
    assert sums == list(range(sums[0], sums[0] + len(sums)))
    assert step.seconds == step.window + step.sums + step.optimizer
    assert step.window + step.sums == pytest.approx(timeline.seconds + step.casts)
    assert Kind.GRADIENTS not in step.exposed
    assert step_of(paper, True, tp=2, microbatches=4, plan=plan).sums == 0.0


def test_recomputation_trades_time_for_memory(paper: SimulatedModel):
    steps = [step_of(paper, tp=2, recompute=mode) for mode in ("none", "selective", "full")]
    assert steps[0].seconds < steps[1].seconds < steps[2].seconds
    assert steps[0].memory.activations > steps[1].memory.activations > steps[2].memory.activations
    assert steps[0].model_flops == steps[2].model_flops


def test_a_host_that_issues_slowly_bounds_the_window_but_for_a_replay_of_a_cuda_graph(paper: SimulatedModel):
    slow = replace(CLUSTER, device=replace(CLUSTER.device, issue_seconds=1e-3, replay_seconds=1e-9))
    step, quick = step_of(paper, cluster=slow, tp=2, cuda_graphs=False), step_of(paper, tp=2)
    operators = 8 * 8 * 45  # of forward and backward of a layer, about
    assert step.window == pytest.approx(operators * 1e-3, rel=0.3)
    assert step.window > 5 * quick.window
    assert step.issuing == step.window - step.casts
    step = step_of(paper, cluster=slow, tp=2)
    assert (step.window, step.issuing, step.replayed) == (quick.window, 1e-9, True)
    assert not step_of(paper, cluster=replace(slow, backend="gloo"), tp=2).replayed


def test_experts_without_a_capacity_run_without_graphs():
    """The host reads how many rows each gets."""
    model = SimulatedModel(on_meta("phimoe", num_local_experts=4), CLUSTER)
    for capacity, replayed in ((None, False), (1.25, True)):
        case = case_of(dp=2, ep=2, expert_capacity_factor=capacity)
        assert is_replayed(case, layout_of(model.amounts(case), case), CLUSTER) is replayed


def test_what_a_pipeline_cannot_hold_is_refused(paper: SimulatedModel):
    case = case_of(pp=8)
    with pytest.raises(
        ValueError, match="8 layers and pp_size=8 needs at least 16; the largest pp_size that fits is 4"
    ):
        simulate_step(paper.amounts(case), case, CLUSTER)
    tied = SimulatedModel(on_meta(tie_word_embeddings=True), CLUSTER)
    case = case_of(pp=2, schedule="1f1b")
    with pytest.raises(ValueError, match=r"shares the weights of embedding and head, .* use schedule='auto'"):
        layout_of(tied.amounts(case), case)
    case = case_of()
    whole = simulate_step(tied.amounts(case), case, CLUSTER)
    weights = tied.amounts(case).weights
    assert whole.memory.weights == 4 * (
        2 * weights["layer"].trained + weights["embedding"].trained + LLAMA["hidden_size"]
    )


def test_spread_weights_are_kept_in_parts_and_gathered_for_a_while(paper: SimulatedModel):
    whole, spread = step_of(paper, dp=4), step_of(paper, dp=4, shard_parameters=True)
    kept, mine = whole.memory, spread.memory
    assert (mine.weights, mine.states) == (kept.weights / 4, kept.states / 4)
    assert mine.gradients == kept.gradients + kept.gradients / 4, "in full while a window runs, then in parts"
    layer = 4 * paper.amounts(whole.case).weights["layer"].trained
    assert 2 * layer <= mine.copies <= kept.weights, "a layer and the next, not the model"
    assert spread.gathers == pytest.approx(spread.loads[Kind.INTER_NODE])
    assert whole.gathers == 0 < spread.gathers
    assert step_of(paper, dp=1, shard_parameters=True).seconds == step_of(paper, dp=1).seconds


def test_a_sharded_optimizer_steps_parts_and_gathers_weights_once(paper: SimulatedModel):
    whole, shared = step_of(paper, dp=4), step_of(paper, dp=4, shard_optimizer=True)
    assert shared.memory.weights == whole.memory.weights / 4
    assert shared.memory.states == whole.memory.states / 4
    table = 4 * paper.amounts(whole.case).weights["embedding"].trained  # read in fp32; matrices are copies in bf16
    norms = 4 * (2 * 8 + 1) * LLAMA["hidden_size"]
    assert shared.memory.copies == whole.memory.copies + (table + norms) * 3 / 4
    assert shared.gathers == 0
    assert shared.optimizer == pytest.approx(whole.optimizer / 4)
    assert shared.casts < whole.casts, "weights are gathered in bf16"
    assert shared.window - shared.casts == pytest.approx(whole.window - whole.casts + shared.waits)


def test_gathers_of_the_quick_window_are_near_those_of_the_whole_one(paper: SimulatedModel):
    """They wait for the same, which here is much: the link is slow."""
    case = {"dp": 4, "microbatches": 4, "schedule": "folded_1f1b"}
    quick, whole = (step_of(paper, each, **case, shard_optimizer=True) for each in (False, True))
    assert whole.waits > 0
    assert abs(quick.waits - whole.waits) <= 0.05 * whole.seconds


def test_the_wait_for_a_slow_network_is_exposed_and_no_bubble(paper: SimulatedModel):
    """One strand of 1f1b over a slow and a fast network, under the same order."""
    network = replace(CLUSTER.network, bandwidth=1e12, latency=0.0)
    case = {"pp": 4, "schedule": "1f1b", "plan": "sequential", "microbatches": 12}
    slow, fast = (step_of(paper, cluster=each, **case) for each in (CLUSTER, replace(CLUSTER, network=network)))
    waits = [step.exposed[Kind.PIPELINE] for step in (slow, fast)]
    assert waits[0] - waits[1] == pytest.approx(slow.window - fast.window, rel=0.05)
    assert slow.bubble * slow.window == pytest.approx(fast.bubble * fast.window, rel=0.05)
    assert waits[0] > 1.5 * waits[1]


def test_a_search_predicts_a_pipeline_over_slow_links_as_a_whole_window(paper: SimulatedModel):
    case = {"pp": 4, "schedule": "1f1b", "microbatches": 32}
    quick, whole = step_of(paper, quick=True, **case), step_of(paper, whole=True, **case)
    assert quick.window == pytest.approx(whole.window, rel=0.05)
