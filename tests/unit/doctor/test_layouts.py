"""The doctor's search: what cannot be cut or does not fit is not proposed, and the best comes first."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.simulated import cluster_with, on_meta

from hf_helix.config import OFFLOADS
from hf_helix.doctor import layouts as searching
from hf_helix.doctor.amounts.records import STATES
from hf_helix.doctor.case import Case
from hf_helix.doctor.layouts import (
    ONE_STRAND,
    Dropped,
    Ranking,
    Search,
    check_sizes,
    is_plain,
    layouts,
    open_bounds,
    ranked,
)
from hf_helix.doctor.report import shards_line
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import Step, layout_of, memory_of_case, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.models.families.llama import Llama
from hf_helix.models.graph.context import ParallelContext
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster, Host
from hf_helix.planning.timing.sizes import Sizes
from hf_helix.runtime.rank_units import cut_layers

# Four devices joined by links that are slow for them.
CLUSTER = cluster_with(devices_per_node=4, device={"peak_tflops": {"bf16": 0.05}}, node={"gb_per_s": 1})
LENGTH = 64
USUAL = Case.of(Sizes(), 1, LENGTH, 1)
SEQUENCES = 512  # of a step: so many that sums of gradients are a small part of it


def test_nothing_is_counted_of_a_model_that_all_devices_together_do_not_hold() -> None:
    paper = paper_of(num_hidden_layers=4, hidden_size=96, num_attention_heads=6)
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory=1000.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "rival", lambda *_: None)
        patch.setattr(SimulatedModel, "amounts", lambda *_: pytest.fail("counted"))
        found = search(paper, small)
    assert not found.steps
    assert len(found.dropped) == len(list(layouts(small)))
    assert all("if all devices share these" in each.reason for each in found.dropped)


@functools.cache
def paper_of(model_type: str = "llama", **options: Any) -> SimulatedModel:
    """What layouts of a model do on a node, counted once for all tests: rates and memory of devices do not matter."""
    return SimulatedModel(on_meta(model_type, **options), CLUSTER)


def search(paper: SimulatedModel, cluster: Cluster = CLUSTER, sequences: int = 32, **options: Any) -> Ranking:
    tokens = sequences * LENGTH
    return Search(paper, cluster, tokens, USUAL, **options).run()


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    paper = paper_of(num_hidden_layers=4, hidden_size=96, num_attention_heads=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "rival", lambda *_: None)  # no layout; tests/unit/doctor/test_rivals.py has it
        return search(paper, sequences=SEQUENCES)


def search_of(
    sizes: Sizes, paper: SimulatedModel, cluster: Cluster, sequences: int = 32, leading: int = 0, **options: Any
) -> Ranking:
    """What is found for some parallel sizes alone, which does not depend on what is found for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "layouts", lambda *_: [sizes])
        patch.setattr(Search, "rival", lambda *_: None)
        return search(paper, cluster, sequences, leading=leading, **options)


def with_leading(search: Search, steps: Sequence[Step]) -> tuple[list[Step], list[Dropped]]:
    """The steps as a search shows them, the fastest first, and the layouts that turn out not to fit."""
    timed, unfit = search._timed(steps)
    return search._with_details(timed), unfit


def reasons(ranking: Ranking) -> dict[Sizes, str]:
    return {each.case.sizes: each.reason for each in ranking.dropped}


def test_every_layout_is_proposed_or_dropped_with_a_reason(ranking: Ranking):
    proposed = [step.case.sizes for step in ranking.steps]
    assert {*proposed, *reasons(ranking)} == set(layouts(CLUSTER))
    assert len(proposed) + len(ranking.dropped) == len(list(layouts(CLUSTER)))
    assert all(sizes.devices == 4 for sizes in proposed)
    # The fastest comes first and uses no more tokens than asked for.
    speeds = [step.tokens_per_second for step in ranking.steps]
    assert speeds == sorted(speeds, reverse=True)
    assert all(step.case.tokens == SEQUENCES * LENGTH for step in ranking.steps)
    # Plain data parallelism is judged by the same rules.
    plain = ranking.plain()
    assert plain is not None
    assert is_plain(plain.case)
    assert plain.case.sizes == Sizes(dp=4)
    assert plain is ranking.steps[0], "a small model communicates least without being cut"
    # The optimizer is in shards wherever there are copies.
    for step in ranking.steps:
        assert step.case.config.shard_optimizer == (step.case.sizes.dp > 1)
    # One strand is run where two have nothing to hide.
    for step in ranking.steps:
        assert (step.case.config.plan == ONE_STRAND) is is_plain(step.case)


def test_those_that_lead_are_predicted_at_higher_fidelity_and_ranked_by_that(ranking: Ranking):
    """Plain data parallelism, too; others are ranked behind them by their quick prediction."""
    leading, last = 2, ranking.steps[-1]
    paper = paper_of(num_hidden_layers=4, hidden_size=96, num_attention_heads=6)
    searched = Search(paper, CLUSTER, SEQUENCES * LENGTH, USUAL, leading=leading)
    slow = replace(ranking.steps[0], window=2 * last.window)  # as if the first were the last but for exactness
    steps, unfit = with_leading(searched, [slow, *ranking.steps[1:]])
    assert not unfit
    assert [step.tokens_per_second for step in steps] == sorted((s.tokens_per_second for s in steps), reverse=True)
    assert {step.case.sizes for step in steps} == {step.case.sizes for step in ranking.steps}
    exact = [step for step in steps if step.fidelity is not Fidelity.QUICK]
    assert set(map(id, steps[:leading])) <= set(map(id, exact))
    assert any(is_plain(step.case) for step in exact)
    for step in steps[:leading]:
        drawn = simulate_step(paper.amounts(step.case), step.case, CLUSTER)
        assert step.seconds == pytest.approx(drawn.seconds, rel=2e-3), "which is simulated from end to end"
    assert all(step.fidelity is Fidelity.QUICK for step in ranking.steps), "nothing leads unless it is asked for"


def test_bounds_change_nothing_of_the_fastest(ranking: Ranking):
    """A bound is below the seconds of its layout, and stands for none of the wanted layouts."""
    paper = paper_of(num_hidden_layers=4, hidden_size=96, num_attention_heads=6)
    wanted = 2
    bounded = Search(paper, CLUSTER, SEQUENCES * LENGTH, USUAL, wanted=wanted).run()
    assert bounded.steps[:wanted] == ranking.steps[:wanted]
    assert {step.case.sizes for step in bounded.steps} == {step.case.sizes for step in ranking.steps}
    known = {step.case: step for step in ranking.steps}
    bounds = [step for step in bounded.steps if step.fidelity is Fidelity.BOUND]
    assert bounds
    for step in bounds:
        assert step.case not in known or step.seconds <= known[step.case].seconds
    # A bound that leads all the same is looked at.
    steps, _ = with_leading(Search(paper, CLUSTER, SEQUENCES * LENGTH, USUAL, leading=1), bounds)
    assert steps[0].fidelity is Fidelity.WHOLE


def test_what_leads_and_needs_more_than_it_seemed_recomputes_or_is_dropped(ranking: Ranking):
    """The quick count of memory knows no programs. What seems to need as much less takes its place."""
    paper = paper_of(num_hidden_layers=4, hidden_size=96, num_attention_heads=6)
    cut = next(step for step in ranking.steps if step.case.sizes.tp > 1 and step.case.sizes.pp == 1)

    def leading(room: float) -> tuple[list[Any], list[Any]]:
        scarce = replace(CLUSTER, device=replace(CLUSTER.device, memory=room))
        return with_leading(Search(paper, scarce, SEQUENCES * LENGTH, USUAL, leading=1), [cut])

    (kept,), _ = leading(math.inf)
    (saving,), dropped = leading(0.99 * kept.memory.total)
    assert not dropped
    assert saving.fidelity is not Fidelity.QUICK
    assert saving.case != kept.case
    assert saving.memory.total <= 0.99 * kept.memory.total
    steps, dropped = leading(0.1 * kept.memory.total)
    assert not steps
    assert dropped[0].reason.startswith("needs ")


PAIR = replace(CLUSTER, devices_per_node=2)


def test_what_cannot_be_cut_is_dropped_with_the_reason(ranking: Ranking):
    result = reasons(ranking)
    assert "tp_size=4 must divide the model's 6 attention heads and 2 key-value heads" in result[Sizes(tp=4)]
    assert (
        result[Sizes(pp=4)]
        == "the model has 4 layers and pp_size=4 needs at least 8; the largest pp_size that fits is 2; "
        "with schedule='1f1b' it needs 4"
    )
    assert result[Sizes(cp=2, dp=2)] == "cp_size=2 leaves less than 2,048 of 64 tokens to a rank"
    short = search(paper_of(), sequences=2)
    assert reasons(short)[Sizes(dp=4)] == "4 data-parallel ranks take 256 tokens at a time; no step comes near 128"
    assert all(step.case.sizes.dp <= 2 for step in short.steps)


@pytest.mark.slow
def test_experts_are_shared_where_they_divide():
    result = search(paper_of("mixtral", num_local_experts=6, num_experts_per_tok=2))
    assert Sizes(dp=4, ep=2) in [step.case.sizes for step in result.steps]
    assert reasons(result)[Sizes(dp=4, ep=4)] == "ep_size x tp_size = 4 does not divide the 6 experts"


def test_sizes_are_checked_before_anything_is_counted_and_tensor_parallelism_leaves_small_nodes_alone():
    check_sizes(Sizes(tp=2, cp=2, pp=2), 8192, 4)
    with pytest.raises(ValueError, match="cp_size=8 leaves less than 2,048 of 8,192 tokens"):
        check_sizes(Sizes(cp=8), 8192, 4)
    check_sizes(Sizes(pp=4), 8192, 4, schedule="1f1b")
    with pytest.raises(ValueError, match="pp_size=4 needs at least 8"):
        check_sizes(Sizes(pp=4), 8192, 4)
    for nodes, per_node, tp in ((2, 1, {1, 2}), (4, 2, {1, 2, 4, 8}), (16, 1, {1, 2, 4, 8}), (4, 8, {1, 2, 4, 8})):
        assert {sizes.tp for sizes in layouts(cluster_with(nodes=nodes, devices_per_node=per_node))} == tp


def test_the_optimizer_is_whole_where_that_is_faster_and_fits():
    """Each of the many gathers takes a millisecond before anything is sent; all gradients are one sum."""
    paper = paper_of(num_hidden_layers=4)
    slow = replace(PAIR, node=replace(CLUSTER.node, latency=1e-3))
    plain = search_of(Sizes(dp=2), paper, slow, leading=1).plain()
    assert plain is not None
    assert not plain.case.config.shard_optimizer
    shared = plain.case.changed(shard_optimizer=True)
    step = simulate_step(paper.amounts(shared), shared, slow, Fidelity.WHOLE)
    assert plain.seconds < step.seconds
    assert step.memory.total < plain.memory.total
    line = shards_line(plain, step)
    assert f"{step.seconds / plain.seconds - 1:.1%} slower" in line
    assert f"{step.waits:.3f} s of waiting for weights" in line
    scarce = replace(slow, device=replace(slow.device, memory=(plain.memory.total + step.memory.total) / 2))
    saved = search_of(Sizes(dp=2), paper, scarce).plain()
    assert saved is not None
    assert saved.case.config.shard_optimizer or saved.case.config.shard_parameters


def test_one_strand_is_tried_where_two_need_recomputation():
    """A device that holds the activations of one strand alone, and links on which there is little to hide."""
    paper, sizes = paper_of(num_hidden_layers=4), Sizes(tp=2)
    roomy = replace(CLUSTER, devices_per_node=2, node=replace(CLUSTER.node, bandwidth=1e12))
    one, two = (Case.of(sizes, 1, LENGTH, 8, plan=plan) for plan in (ONE_STRAND, "greedy"))
    needs = [memory_of_case(paper.amounts(case), case).total for case in (one, two)]
    assert needs[0] < needs[1]
    tight = replace(roomy, device=replace(roomy.device, memory=sum(needs) / 2))
    for cluster, plan in ((roomy, "greedy"), (tight, ONE_STRAND)):
        (step,) = search_of(sizes, paper, cluster, sequences=8).steps
        assert (step.case.config.plan, step.case.recompute) == (plan, "none")


def test_a_schedule_that_holds_less_is_named_where_auto_does_not_fit():
    paper, sizes = paper_of(num_hidden_layers=8), Sizes(pp=4)
    kept = Case.of(sizes, 1, LENGTH, 32, plan=ONE_STRAND, recompute="full")
    auto, linear = (kept.changed(schedule=name) for name in ("auto", "1f1b"))
    needs, least = (memory_of_case(paper.amounts(case), case).total for case in (auto, linear))
    assert least < needs
    for room, schedule in ((1.05 * needs, "auto"), ((least + needs) / 2, "1f1b")):
        cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory=room))
        (step,) = search_of(sizes, paper, cluster).steps
        assert step.case.config.schedule == schedule
        assert step.memory.total <= room
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory=0.9 * least))
    ranking = search_of(sizes, paper, cluster)
    assert not ranking.steps
    assert "with all that saves memory" in reasons(ranking)[sizes]


def test_gradients_are_reduced_in_every_micro_batch_where_that_saves_recomputation() -> None:
    paper, sizes = paper_of(num_hidden_layers=24), Sizes(dp=2)

    def memory(**saving: str) -> float:
        case = Case.of(sizes, 1, LENGTH, 16, plan="sequential", shard_parameters=True, **saving)
        return memory_of_case(paper.amounts(case), case).total

    once, often = memory(reduce_gradients="window"), memory(reduce_gradients="microbatch")
    assert often < once
    device = replace(CLUSTER.device, memory=(once + often) / 2)
    fast = replace(PAIR, device=device, node=replace(PAIR.node, bandwidth=1e15))
    step = search_of(sizes, paper, fast).plain()
    assert step is not None
    assert (step.case.config.reduce_gradients, step.case.config.shard_parameters) == ("microbatch", True)
    room = replace(fast, device=replace(device, memory=4 * once))
    step = search_of(sizes, paper, room).plain()
    assert step is not None
    assert step.case.config.reduce_gradients == "window"


def test_states_on_the_host_leave_room_and_take_its_time():
    paper, sizes = paper_of(num_hidden_layers=4), Sizes(tp=2)
    usual, offloaded = (
        simulate_step(paper.amounts(case), case, CLUSTER)
        for case in (Case.of(sizes, 1, LENGTH, 8), Case.of(sizes, 1, LENGTH, 8, offload="optimizer"))
    )
    trained = usual.memory.states / STATES
    whole, small = (memory_of_case(paper.amounts(usual.case), replace(usual.case, state_bytes=n)) for n in (STATES, 2))
    assert small.states == whole.states / 4 == usual.memory.states / 4
    assert whole.total - small.total == whole.states - small.states
    assert usual.memory.weights == 4 * trained
    assert (offloaded.memory.states, offloaded.memory.weights) == (0, 0)
    assert offloaded.memory.gradients == usual.memory.gradients
    assert usual.memory.copies < offloaded.memory.copies <= 4 * trained
    # A gradient, weight and states twice, and the weight and its cast, of every device of the node.
    of_node = CLUSTER.devices_per_node * trained
    assert offloaded.optimizer == pytest.approx((28 + 6) * of_node / CLUSTER.host.memory)
    assert offloaded.host == pytest.approx((4 + 8 + 4 + 2) * of_node)
    slow = replace(CLUSTER, host=replace(CLUSTER.host, bandwidth=CLUSTER.host.bandwidth / 1e4))
    assert simulate_step(paper.amounts(case := offloaded.case), case, slow).seconds > 1.1 * offloaded.seconds


def test_states_lie_on_the_host_if_nothing_fits_without_or_the_fastest_recomputes():
    paper, sizes = paper_of(num_hidden_layers=4), Sizes(tp=2)
    kept, full = (
        memory_of_case(paper.amounts(case), case).total
        for case in (Case.of(sizes, 1, LENGTH, 32, plan=ONE_STRAND, recompute=mode) for mode in ("none", "full"))
    )
    assert full < kept
    for room, offloads, expected in (
        (10 * kept, {"optimizer": True, "parameters": False}, None),
        ((full + kept) / 2, {}, None),
        ((full + kept) / 2, {"optimizer": False}, None),
        ((full + kept) / 2, {"optimizer": True, "parameters": False}, "optimizer"),
        (0.9 * full, {"optimizer": False, "parameters": False}, "optimizer"),
    ):
        cluster = replace(CLUSTER, devices_per_node=2, device=replace(CLUSTER.device, memory=room))
        (step,) = search_of(sizes, paper, cluster, leading=1, offloads=offloads).steps
        assert step.case.config.offload == expected
        assert step.memory.total <= room


def test_the_later_of_two_ways_is_taken_only_if_clearly_faster(ranking: Ranking) -> None:
    first = ranking.steps[0]

    def faster(ratio: float, fidelity: Fidelity = Fidelity.QUICK) -> Step:
        return replace(first, window=first.seconds / ratio, sums=0.0, optimizer=0.0, fidelity=fidelity)

    one, near, far = faster(1.0), faster(1.04), faster(1.06)
    assert ranked([one, near]) == [one]
    assert ranked([one, far]) == [far]
    # It is faster than a bound, but perhaps not by as much: then what the bound stands for is looked at.
    high, low = faster(1.02, Fidelity.BOUND), faster(0.9, Fidelity.BOUND)
    for bound, is_open in ((high, True), (low, False)):
        assert ranked([bound, near]) == [near]
        assert [*open_bounds([bound, near], [near])] == [bound] * is_open


def test_an_update_hides_the_copies_of_other_slices():
    """By an update that takes long, all of them; by one that takes no time, none."""
    paper = paper_of(num_hidden_layers=4)
    case = Case.of(Sizes(tp=2), 1, LENGTH, 8, offload="optimizer")
    quick, slow = (
        simulate_step(paper.amounts(case), case, replace(CLUSTER, host=Host(bandwidth=1e9, memory=memory)))
        for memory in (1e18, 1e8)
    )
    assert quick.sums > 0
    assert quick.waits > 0
    assert (slow.sums, slow.waits) == (pytest.approx(0, abs=1e-6), 0)
    assert slow.window == pytest.approx(quick.window - quick.waits, rel=1e-6)


def test_weights_on_the_host_leave_room_and_are_copied_for_every_use():
    paper, sizes = paper_of(num_hidden_layers=12), Sizes(tp=2)
    kept, streamed = (
        simulate_step(paper.amounts(case), case, CLUSTER)
        for case in (Case.of(sizes, 1, LENGTH, 8, offload=kind) for kind in OFFLOADS)
    )
    assert streamed.memory.gradients == kept.memory.gradients
    assert (streamed.memory.weights, streamed.memory.states) == (0, 0)
    assert streamed.memory.copies < 0.7 * kept.memory.copies
    assert (streamed.host, streamed.optimizer) == (kept.host, kept.optimizer)
    # In bf16, forward and backward of every micro-batch; of the head, forward alone; of the table and of norms, fp32.
    trained = streamed.host / CLUSTER.devices_per_node / (4 + 8 + 4 + 2)
    assert streamed.loads[Kind.UP] * CLUSTER.host.bandwidth / 8 == pytest.approx(2 * 2 * trained, rel=0.1)
    slow = replace(CLUSTER, host=replace(CLUSTER.host, bandwidth=CLUSTER.host.bandwidth / 1e4))
    waiting = simulate_step(paper.amounts(case := streamed.case), case, slow)
    assert waiting.exposed[Kind.UP] > 0.5 * waiting.loads[Kind.UP]
    assert waiting.seconds > waiting.loads[Kind.UP]


def test_inputs_of_layers_on_the_host_leave_room():
    """All but those of a few layers at work; copied down and up once for every layer and micro-batch."""
    paper = paper_of(num_hidden_layers=12)
    full, away = (
        simulate_step(paper.amounts(case), case, CLUSTER)
        for case in (Case.of(Sizes(), 1, LENGTH, 8, plan=ONE_STRAND, recompute=mode) for mode in ("full", "offload"))
    )
    kept = 4 * 64 * LENGTH  # bytes of an input, in fp32
    assert 8 * kept < full.memory.activations - away.memory.activations < 12 * kept
    assert full.memory.copies == away.memory.copies
    assert (full.host, away.host) == (0, CLUSTER.devices_per_node * 18 * kept), "half of the next micro-batch, too"
    case = away.case.changed(Sizes(pp=4), schedule="1f1b", plan="greedy")
    pipeline = simulate_step(paper.amounts(case), case, CLUSTER)
    assert pipeline.host == 4 * 4 * 3 * kept, "the first rank has four micro-batches in its three layers"
    for kind in (Kind.UP, Kind.DOWN):
        assert away.loads[kind] * CLUSTER.host.bandwidth == pytest.approx(8 * 12 * kept)
    slow = replace(CLUSTER, host=replace(CLUSTER.host, bandwidth=CLUSTER.host.bandwidth / 300))
    busy = simulate_step(paper.amounts(away.case), away.case, slow)
    assert busy.loads[Kind.DOWN] > 0.5 * busy.loads[Kind.COMPUTE]
    assert busy.exposed[Kind.DOWN] < 0.2 * busy.loads[Kind.DOWN], "no barrier waits for copies down"


def test_layers_between_stages_are_cut_where_this_makes_a_pipeline_faster():
    """Five layers on two ranks: a rank with three is the slower. The run declares the layout that was predicted."""
    paper = paper_of(num_hidden_layers=5, hidden_size=96, num_attention_heads=6, vocab_size=64)
    two = cluster_with(devices_per_node=2, device={"peak_tflops": {"bf16": 0.05}}, node={"gb_per_s": 1})
    (step,) = search_of(Sizes(pp=2), paper, two, sequences=128, leading=1).steps
    counts = step.case.config.layers_per_stage
    assert counts is not None
    assert any(count % 1 for count in counts)
    amounts = paper.amounts(step.case)
    whole = simulate_step(amounts, step.case.changed(layers_per_stage=None), two, Fidelity.WHOLE)
    assert step.seconds < 0.97 * whole.seconds
    model = on_meta("llama", num_hidden_layers=5, hidden_size=96, num_attention_heads=6, vocab_size=64)
    units = Llama().units(model, ParallelContext())
    cut, _, of_stages = cut_layers(units, ["none"] * 5, (0, 1, 1, 0), layers_per_stage=counts)
    layout = layout_of(amounts, step.case)
    assert [unit.name for unit in cut] == [
        name for place, name in enumerate(layout.units) if not layout.transfers(place)
    ]
    assert sum(of_stages) == len(cut) - 2
