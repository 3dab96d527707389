"""The pieces of the GPU acceptance fit into three calls of ten minutes."""

from collections import Counter

from benchmarks.gpu.pieces import PIECES


def test_a_call_takes_at_most_ten_minutes() -> None:
    seconds = Counter[int]()
    for piece in PIECES:
        seconds[piece.call] += piece.seconds
    assert sorted(seconds) == [1, 2, 3]
    assert max(seconds.values()) <= 600
