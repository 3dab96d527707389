"""The lookup of token embeddings in a table that is cut by rows.

In:   an embedding, perhaps with LoRA beside it, and the tensor-parallel ranks.
Out:  a segment from side input `ids` [tokens, batch] to partial sums over the ranks [tokens, batch, hidden].
Must hold: a rank gives zeros for tokens of other ranks' rows, so the sum over the ranks is exact; one rank alone adds
the noise of NEFTune.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_helix.models.peft import Unwrapped
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.param_shard import cut_bounds
from hf_helix.operators.segment import Segment
from hf_helix.operators.vocab_parallel import lookup, noisy


def lookup_segment(table: Unwrapped, embedding: nn.Module, tp: Axis, neftune_alpha: float | None) -> Segment:
    """Returns the segment of a lookup.

    Args:
        table: the plain embedding and the adapters beside it.
        embedding: the submodule of the model, which says whether it is in training.
        tp: the tensor-parallel ranks that the rows are cut over.
        neftune_alpha: `TrainingArguments.neftune_noise_alpha`; None for no noise.
    """
    num_rows = table.weight.shape[0]
    first, _ = cut_bounds(num_rows, tp.size, tp.rank)
    padding = table.module.padding_idx

    def find(ids: Tensor) -> Tensor:
        value = total = lookup(ids, table.weight, first, num_rows, padding)
        for adapter in table.adapters():
            low = lookup(ids, adapter.down.t(), first, num_rows, padding)
            total = total + low @ adapter.up.t() * adapter.scaling
        return total.to(value.dtype)

    def find_noisy(ids: Tensor, length: int) -> Tensor:
        assert neftune_alpha is not None
        return noisy(find(ids), neftune_alpha, length) if embedding.training else find(ids)

    parameters: list[Any] = [copy.weight for copy in table.copies]
    for adapter in table.all_adapters():
        parameters += adapter.parameters
    reads = table.lora is not None  # the gradient of a table does not depend on what is in it
    if neftune_alpha is not None and tp.rank == 0:  # one of the partial sums brings the noise
        draws, side = (lambda: embedding.training), ("ids", "length")
        return Segment(find_noisy, parameters, side, draws=draws, backward_reads=reads)
    return Segment(find, parameters, ("ids",), backward_reads=reads)
