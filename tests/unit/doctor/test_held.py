"""Until when collectives hold what they work with, by hand: of a GPU until they are waited for, of a CPU until over."""

import pytest

from hf_helix.doctor.memory import held_until_over, held_until_waited
from hf_helix.planning.graph.operator import Kind, Operator
from hf_helix.planning.window.instructions import BARRIER_INSTRUCTION, Instruction


def made(
    name: str,
    reads: str = "",
    writes: str = "",
    frees: str = "",
    microbatch: int = 0,
    ends: bool = False,
    ahead: int = 0,
) -> Instruction:
    """An operator of one unit; what is called "gather..." is a collective. Values are single letters."""
    kind = Kind.INTRA_NODE if name.startswith("gather") else Kind.COMPUTE
    op = Operator(name=name, kind=kind, reads=tuple(reads), writes=tuple(writes), ahead=ahead)
    keys = [tuple((0, value) for value in values) for values in (reads, writes, frees)]
    return Instruction(microbatch, 0, op, reads=keys[0], writes=keys[1], frees=keys[2], ends=ends)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ([made("gather", "a", "b"), made("other", "c"), made("up", "b")], {0: 2}),
        ([made("gather", "a", "b"), made("other", "c"), BARRIER_INSTRUCTION, made("up", "b")], {0: 2}),
        ([made("gather", "", "b", ahead=1), BARRIER_INSTRUCTION, made("up", "b")], {0: 2}),
        ([made("gather", "a", "b"), made("other", "c", ends=True), made("up", "b", microbatch=1)], {0: 2}),
        # The second comes after the first, whose event it knows until it is waited for itself.
        (
            [made("gather1", "a", "b"), made("gather2", "b", "c", "b"), made("other", "d"), made("up", "c")],
            {0: 3, 1: 3},
        ),
        ([made("gather1", "a", "b"), made("gather2", "b", "c"), made("up", "b"), made("down", "c")], {0: 2, 1: 3}),
        # Nothing waits for a value that nothing reads: its event is gone with it.
        ([made("gather", "a", "b"), made("other", "c", frees="b"), made("up", "c")], {0: 2}),
        ([made("gather", "a", "b"), made("up", "b", microbatch=1), made("up", "b")], {0: 2}),
    ],
)
def test_a_gpu_holds_until_computation_is_told_to_wait(program: list[Instruction], expected: dict[int, int]):
    assert held_until_waited(program) == expected


def test_a_cpu_holds_until_the_collective_is_over():
    program = [made("gather1", "a", "b"), made("first", "c"), made("gather2", "d", "e"), made("second", "c")]
    program += [made("third", "b"), made("gather3", "f", "g")]
    starts, ends = [0.0, 0.0, 1.0, 1.0, 3.0, 4.0], [2.0, 1.0, 3.0, 3.0, 4.0, 5.0]
    assert held_until_over(program, starts, ends) == {0: 4, 2: 4, 5: 6}
