"""All weights in the model for a while, where data-parallel ranks have spread them.

In:   a cut model.
Out:  the same model as an ordinary one, whose parameters hold their values on every rank.
Must hold: afterwards everything that ranks have spread is as before; a rank that would have slices of the model even
then gets an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hf_helix.checkpoint.shard import has_slices
from hf_helix.models.direct_use import direct_use_allowed
from hf_helix.operators.zero.zero1 import kept_flats
from hf_helix.runtime.distributed.agreement import meet
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.stage import Stage


@contextlib.contextmanager
def whole_weights(model: Any, stage: Stage, mesh: Mesh) -> Iterator[Any]:
    """Returns the context of `Engine.whole_weights`.

    Args:
        model: the cut model.
        stage: its units on this rank.
        mesh: the layout of the ranks.

    Yields:
        The model.

    Raises:
        ValueError: this rank has slices of the model even then.
        RuntimeError: it is within such a context already.
    """
    if has_slices(stage, mesh):
        sizes = [f"{name}={size}" for name, size in mesh.option_sizes.items() if size > 1]
        raise ValueError(
            f"whole_weights() with {' and '.join(sizes)}: every rank has slices of the model, even with all that "
            "data-parallel ranks have spread; save the model, and load it with from_pretrained(folder)"
        )
    with plain_parameters():
        for flat in stage.flats:
            flat.check_not_lent()
        # Some pieces are what ranks keep and step, so what is written to their parameters would stay.
        before = {flat: flat.shard.clone() for flat in kept_flats(stage.flats) if flat.cast_to is None}
        with watched():
            meet("whole_weights() is entered")
            for flat in stage.flats:
                flat.lend(flat.gather())
        try:
            with direct_use_allowed():
                yield model
        finally:
            for flat in stage.flats:
                flat.take_back()
            for flat, stretch in before.items():
                flat.shard.copy_(stretch)
                flat.outdate()
