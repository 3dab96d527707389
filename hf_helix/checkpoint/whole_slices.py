"""Slices that are whole again for a while, where parameters are spread over the data-parallel ranks.

In:   a stage, and the tensors of its model one after the other.
Out:  each of them as this rank held it before it was spread: a slice over tp or over experts, or all of it.
Must hold: a few flats are gathered at a time, so memory stays small, and none is left whole, whatever happens. All
ranks that share a flat ask for its tensors in the same order. What was written to a slice is kept by the ranks that own
it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from hf_helix.operators.zero.flat_parameter import Flat
from hf_helix.runtime.stage import Stage

MOST = 4
"""How many flats are whole at a time; more where a unit has more, since its tensors come in any order."""


class WholeSlices:
    """Lends gathered pieces to parameters, within its context.

    Args:
        stage: whose parameters may be spread; of others, nothing happens.
        written: whether tensors are written to meanwhile.
    """

    def __init__(self, stage: Stage, written: bool = False) -> None:
        self._flats = {parameter: flat for flat in stage.flats if flat.is_spread for parameter in flat.placements}
        self._written = written
        self._max_lent = max([MOST, *(len(set(unit.flats.values())) for unit in stage.units.values())])
        self._lent: dict[Flat, None] = {}  # the one that was used last comes last

    @property
    def is_needed(self) -> bool:
        """Whether any parameter is spread."""
        return bool(self._flats)

    def __enter__(self) -> WholeSlices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for flat in list(self._lent):
            self._return(flat)

    def lend(self, tensor: Any) -> None:
        """Makes a tensor whole, until some others have been. Collective over the ranks that it is spread over.

        Raises:
            RuntimeError: somebody else has made it whole.
        """
        flat = self._flats.get(tensor)
        if flat is None:
            return
        if flat in self._lent:
            del self._lent[flat]
        else:
            if len(self._lent) == self._max_lent:
                self._return(next(iter(self._lent)))
            flat.check_not_lent()
            flat.lend(flat.gather())
        self._lent[flat] = None

    def _return(self, flat: Flat) -> None:
        if self._written and flat.lent is not None:
            flat.keep(flat.lent)
        flat.take_back()
        del self._lent[flat]
