"""From rank to rank: what is sent arrives, in the order of the way, in room that is made from the micro-batch."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor

from hf_helix.operators.base import Call
from hf_helix.operators.communication.collectives import P2PChannel, PipelineTransfer, transfer_unit
from hf_helix.planning.graph.backward import RECEIVE, SEND, transfer_graphs
from hf_helix.planning.graph.operator import Kind, Part


class Pigeonhole(P2PChannel):
    """Both ends in one process: what is sent lies here, by direction, until it is received."""

    def __init__(self) -> None:
        self.lying: dict[bool, deque[Tensor]] = {True: deque(), False: deque()}

    def send(self, value: Tensor, forward: bool) -> None:
        assert value.is_contiguous()
        self.lying[forward].append(value)

    def receive(self, out: Tensor, forward: bool) -> None:
        out.copy_(self.lying[forward].popleft())


def call(length: int = 4) -> Call:
    return Call({"ids": torch.zeros(length, 2)}, 0, True)


def transfer(channel: P2PChannel, boundary: int = 0) -> PipelineTransfer:
    return PipelineTransfer(channel, boundary, lambda side: (torch.full((*side["ids"].shape, 3), -1.0),))


@pytest.mark.parametrize(("part", "forward"), [(Part.F, True), (Part.B, False)])
def test_what_leaves_is_sent_by_the_work_and_not_before(part: Part, forward: bool) -> None:
    hole, value = Pigeonhole(), torch.randn(4, 2, 3)
    outputs, work = transfer(hole).prepare(call(), part, value)
    assert outputs == ()
    assert not hole.lying[forward]
    work()
    assert torch.equal(hole.lying[forward].pop(), value)
    assert not hole.lying[not forward]


@pytest.mark.parametrize(("part", "forward"), [(Part.F, True), (Part.B, False)])
@pytest.mark.parametrize("length", [4, 7])
def test_what_arrives_fills_room_of_the_micro_batchs_shape(part: Part, forward: bool, length: int) -> None:
    hole, value = Pigeonhole(), torch.randn(length, 2, 3)
    (out,), work = transfer(hole).prepare(call(length), part)
    assert out.shape == value.shape
    assert (out == -1).all()
    hole.send(value, forward)
    work()
    assert torch.equal(out, value)


def test_several_values_pass_in_order() -> None:
    """What routers count travels with the activations."""
    hole, values = Pigeonhole(), (torch.randn(4, 2, 3), torch.randn(1, 2, 5))
    several = PipelineTransfer(hole, 0, lambda side: (torch.empty(4, 2, 3), torch.empty(1, 2, 5)))
    several.prepare(call(), Part.F, *values)[1]()
    outputs, work = several.prepare(call(), Part.F)
    work()
    assert all(map(torch.equal, outputs, values))
    unit = transfer_unit(SEND, hole, 0, several.make_buffers, values=2)
    assert unit.graphs.forward.inputs == ("x0", "x1")
    assert unit.graphs.backward.outputs == ("d.x0", "d.x1")


def test_strided_values_are_sent_in_one_piece() -> None:
    hole, value = Pigeonhole(), torch.randn(3, 2, 4).transpose(0, 2)
    transfer(hole).prepare(call(), Part.F, value)[1]()
    assert torch.equal(hole.lying[True].pop(), value)


def test_on_the_compute_stream_it_moves_at_once() -> None:
    hole, value = Pigeonhole(), torch.randn(4, 2, 3)
    sending, receiving = transfer(hole), transfer(hole)
    assert sending.method_of(Part.F)(call(), value) == ()
    (there,) = receiving.method_of(Part.F)(call())
    assert receiving.method_of(Part.B)(call(), 2 * there) == ()
    (back,) = sending.method_of(Part.B)(call())
    assert torch.equal(back, 2 * value)


def test_each_direction_of_each_way_is_a_lane() -> None:
    ways = [transfer(Pigeonhole(), boundary) for boundary in (0, 1, 10)]
    lanes = {way.lane(part) for way in ways for part in (Part.F, Part.B)}
    assert len(lanes) == 6
    assert transfer(Pigeonhole(), 1).lane(Part.F) == ways[1].lane(Part.F), "the same at both ends"


def test_gradients_go_the_other_way() -> None:
    """Backward, derived like any other: the gradient comes in where the value went out."""
    pairs = transfer_graphs()
    (send,), (taken,) = pairs[SEND].forward.operators, pairs[SEND].backward.operators
    (receive,), (given,) = pairs[RECEIVE].forward.operators, pairs[RECEIVE].backward.operators
    assert (send.reads, send.writes, taken.reads, taken.writes) == (("x0",), (), (), ("d.x0",))
    assert (receive.reads, receive.writes, given.reads, given.writes) == ((), ("x0",), ("d.x0",), ())
    assert [(op.sends, op.receives) for op in (send, taken, receive, given)] == [
        (True, False), (False, True), (False, True), (True, False),
    ]  # fmt: skip
    assert all(op.kind is Kind.PIPELINE for op in (send, taken, receive, given))
    assert all(graph.transfers for pair in pairs.values() for graph in (pair.forward, pair.backward))


@pytest.mark.parametrize("name", [SEND, RECEIVE])
def test_a_unit_at_an_end_holds_no_parameters(name: str) -> None:
    unit = transfer_unit(name, Pigeonhole(), 3, torch.empty_like)
    assert (unit.name, unit.label, unit.placements) == (name, f"{name}.3", {})
    assert {op.forward_name for op in unit.graphs.backward.operators} == unit.operators.keys()
