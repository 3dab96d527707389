"""Windows of the unsplit model, and of several ranks beside them; `invariant.harness` runs those."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.comparisons import compare_gradients
from support.pipeline_jobs import batches_of, reference

KINDS = ("dense", "left", "right", "packed")
LENGTHS = (33, 16, 21)  # two of them do not divide


def unsplit(
    model: Mapping[str, Any], count: int, kind: str, lengths: Sequence[int] = LENGTHS, rows: int = 2
) -> dict[str, Any]:
    """Losses and gradients of a window through the unsplit model, run once in a session.

    Args:
        model: of `support.models.tiny`.
        count, kind, lengths, rows: of the micro-batches, see `batches_of`.
    """
    return _unsplit(_Given(model), count, kind, tuple(lengths), rows)


class _Given(dict[str, Any]):
    """A model's options as the key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


@functools.cache
def _unsplit(model: Mapping[str, Any], count: int, kind: str, lengths: tuple[int, ...], rows: int) -> dict[str, Any]:
    return reference(dict(model), batches_of(count, rows, lengths=lengths, kind=kind))


def compare_window(
    ranks: Sequence[Mapping[str, Any]],
    expected: Mapping[str, Any],
    dp_size: int,
    ep_size: int = 1,
    what: str = "",
    floor: float = 0.0,
) -> None:
    """Losses to 1e-5, and every gradient by name to 1e-4 of its norm.

    Args:
        ranks: the losses of every rank, and whole gradients on the first rank that shares a batch.
        expected: of the unsplit model, whose window has the micro-batches of all data-parallel ranks.
        dp_size, ep_size: the number of data-parallel ranks, and how many of them share experts.
        what: ran here, for the error.
        floor: of the distance that is allowed, in parts of the norm of all gradients.
    """
    share, count = len(ranks) // dp_size, len(expected["losses"]) // dp_size
    for d in range(dp_size):
        mine = dp_size * np.array(expected["losses"][d * count : (d + 1) * count])
        for rank in ranks[d * share : (d + 1) * share]:
            np.testing.assert_allclose(rank["losses"], mine, rtol=0, atol=1e-5 * dp_size, err_msg=what)
        result = ranks[d * share]["gradients"]
        # Experts are joined on the first of the ranks that share them.
        elsewhere = [name for name, gradient in result.items() if gradient is None]
        assert not elsewhere or (d % ep_size and all(".experts." in name for name in elsewhere))
        compare_gradients(result, expected["gradients"], what, floor)
