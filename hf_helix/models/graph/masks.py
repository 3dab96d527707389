"""The masks of attention, as Transformers makes them.

In:   a model, the tokens of a batch, and what hides some of them.
Out:  one mask for each sliding window of its layers.
Must hold: a sliding window of n tokens reaches from a token over the n tokens up to and including it, padding counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

SlidingWindow = int | None
"""The number of tokens that a token attends to, itself included; None for all before it."""


def causal_masks(
    model: Any, sliding_windows: Iterable[SlidingWindow], ids: Tensor, mask: Tensor | None, documents: Tensor | None
) -> dict[SlidingWindow, Any]:
    """Returns for each window the mask that Transformers would make: a tensor, None, or what the implementation takes.

    Transformers is given neither positions nor a mask that may hide nothing: it would look at their values, and wait
    for the device.

    Args:
        model: the Transformers model.
        sliding_windows: the windows of the layers.
        ids: the tokens [batch, sequence].
        mask: see `Family.attention_inputs`.
        documents: see `Family.attention_inputs`.
    """
    embeddings = like_embeddings(model, ids)
    apart = None if documents is None else _within(documents.expand(len(ids), -1))
    masks = {}
    for window in set(sliding_windows):
        create = create_causal_mask if window is None else create_sliding_window_causal_mask
        masks[window] = create(
            model.config,
            embeddings,
            mask,
            None,  # the cache, whose name Transformers 5.24 has changed
            and_mask_function=apart,
            allow_is_causal_skip=mask is None,
        )
    return masks


def _within(documents: Tensor) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns the mask function of Transformers by which tokens see those of their own document."""
    return lambda row, head, query, key: documents[row, query] == documents[row, key]


def like_embeddings(model: Any, ids: Tensor) -> Tensor:
    """Returns a tensor in the place of embeddings [batch, sequence, 1]: only its shape, type and device are read."""
    return model.get_input_embeddings().weight.new_empty(()).expand(*ids.shape, 1)
