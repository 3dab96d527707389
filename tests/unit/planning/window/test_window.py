"""Windows: what runs in which order before a plan, and under which keys values go from unit to unit."""

from support.arrays import window_instructions
from support.graphs import SMALL, compute, layout_of, pair, schedule_of

from hf_helix.planning.graph.operator import Part
from hf_helix.planning.schedule.actions import Action, Slot
from hf_helix.planning.window.instructions import blocks_of, unit_instructions
from hf_helix.planning.window.layout import Layout

LAYOUT = layout_of(SMALL, 3)  # embedding, layers 1 and 2 | layer 3, head


def test_a_slot_is_cut_into_blocks_of_one_unit_each():
    """By hand: micro-batch 1 down through units 0, 1, 2 beside micro-batch 0 back through 4, 3."""
    slot = Slot(Action(0, "F", 1), Action(1, "B", 0))
    assert list(blocks_of(slot, LAYOUT)) == [
        ((1, 0, True), (0, 4, False)),
        ((1, 1, True), (0, 3, False)),
        ((1, 2, True), None),
    ]
    assert list(blocks_of(Slot(backward=Action(0, "B", 2)), LAYOUT)) == [(None, (2, unit, False)) for unit in (2, 1, 0)]


def test_what_leaves_a_unit_keeps_its_key_in_the_next():
    first = {i.operator.name: i for i in unit_instructions(LAYOUT, (0, 1, True))}
    second = {i.operator.name: i for i in unit_instructions(LAYOUT, (0, 2, True))}
    head = {i.operator.name: i for i in unit_instructions(LAYOUT, (0, 4, True))}
    assert first["norm"].reads == ((0, "scatter"),), "the embedding's output"
    assert first["add"].reads == ((0, "scatter"), (1, "scatter")), "two values of one name in two units"
    assert first["add"].writes == ((1, "add"),)
    assert second["norm"].reads == ((1, "add"),)
    assert head["logits"].reads == ((3, "add"),)


def test_gradients_keep_the_key_of_the_unit_that_writes_them():
    last = {i.operator.name: i for i in unit_instructions(LAYOUT, (0, 3, False))}
    before = {i.operator.name: i for i in unit_instructions(LAYOUT, (0, 2, False))}
    head = {i.operator.name: i for i in unit_instructions(LAYOUT, (0, 4, False))}
    assert head["loss"].reads == ((4, "d.loss"),)
    assert last["add"].reads == ((4, "d.x"),)
    assert last["norm"].accumulates == ((3, "d.x@add"),)
    assert last["norm"].needs == ((3, "d.norm"), (3, "d.x@add"))
    assert last["norm"].writes == ((3, "d.x"),)
    assert before["add"].reads == ((3, "d.x"),)


def test_values_that_leave_together_are_told_apart_by_place():
    twofold = pair("layer", compute("swap", "a b", "c d"), inputs="a b", outputs="d c", repeats=True)
    layout = Layout(["layer"] * 2, {0: [0, 1]}, {"layer": twofold})
    (swap,) = unit_instructions(layout, (0, 1, True))
    assert swap.reads == ((0, "d"), (0, "c"))
    (back,) = unit_instructions(layout, (0, 0, False))
    assert back.reads == ((1, "d.b"), (1, "d.a"))


def test_a_window_holds_every_operator_of_every_micro_batch_once_in_the_order_of_slots_and_units():
    made = window_instructions(schedule_of(2), LAYOUT)
    passes = [(i.microbatch, i.unit, i.operator.part is Part.F) for i in made]
    names = [(*unit_pass, i.operator.name) for unit_pass, i in zip(passes, made, strict=True)]
    assert len(names) == len(set(names))
    assert set(names) == {
        (k, unit, forward, op.name)
        for k in range(2)
        for unit, name in enumerate(LAYOUT.units)
        for forward, graph in ((True, SMALL[name].forward), (False, SMALL[name].backward))
        for op in graph.operators
    }
    text = " ".join(f"{k}{'F' if forward else 'B'}{unit}" for k, unit, forward in dict.fromkeys(passes))
    fused = "1F0 0B4 1F1 0B3 1F2 1F3 0B2 1F4 0B1 0B0"
    assert text == f"0F0 0F1 0F2 0F3 0F4 {fused} 1B4 1B3 1B2 1B1 1B0"
