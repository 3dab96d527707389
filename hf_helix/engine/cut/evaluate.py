"""Evaluation before and after the runner.

In:   a batch; the logits of a rank, of its tokens and its slice of the vocabulary.
Out:  the batch in several micro-batches that run concurrently; the logits of all tokens and of the full vocabulary.
Must hold: every rank of a group that shares the batch gets the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.models.registry import family_of
from hf_helix.models.stock.batch_inputs import LOSS_ALONE, SequenceCut
from hf_helix.operators.communication.collectives import prepare_all_gather
from hf_helix.planning.parameters import cut_bounds
from hf_helix.runtime.cuda_graphs import WindowGraphs
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner


def evaluate_batch(
    runner: Runner,
    base: Any,
    batch: Mapping[str, Any],
    make_window: Callable[[Sequence[Mapping[str, Any]]], list[MicroBatch]],
    keep_logits: bool = False,
    graphs: WindowGraphs | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs a batch forward only. Collective, see `Session.evaluate`.

    Args:
        runner: the runner of the cut model.
        base: the Transformers model.
        batch: tensors with a row for each sequence.
        make_window: makes micro-batches of batches.
        keep_logits: whether logits are also returned.
        graphs: CUDA graphs of windows, if any.

    Returns:
        The loss, and if asked for the logits [batch, sequence, vocabulary], on every rank.
    """
    batch, family = {**batch, LOSS_ALONE: not keep_logits}, family_of(base)
    is_split = family.loss_adds_up(base) and not (runner.has_token_loss or family.reads_images(batch))
    batches = split_rows(batch, runner) if is_split else [batch]
    with torch.no_grad():
        window = make_window(batches)
        loss, logits = (
            runner.evaluate(window, keep_logits) if graphs is None else graphs.evaluate(runner, window, keep_logits)
        )
    if logits is None:
        return loss.detach(), None
    if runner.precision.autocast_dtype is not None:
        logits = logits.float()  # as Accelerate returns outputs of autocast
    head, cut = base.get_output_embeddings().weight, SequenceCut.of(runner.mesh.tp, runner.mesh.cp)
    return loss.detach(), full_logits(logits, runner, head, cut)[:, : batch["input_ids"].shape[1]]


def split_rows(batch: Mapping[str, Any], runner: Runner) -> list[Mapping[str, Any]]:
    """Splits the rows of a batch into enough micro-batches for every rank of the pipeline and two strands.

    Tensors without a row for each sequence belong to every micro-batch.
    """
    mesh, rows = runner.mesh, len(batch["input_ids"])
    most = min(rows, runner.scheduler.max_microbatches or rows)
    count = min(most, 2 * mesh.pipe.size) if mesh.batch_group is not None else 1
    if count < 2:
        return [batch]
    cut = {
        name: value.tensor_split(count) if isinstance(value, Tensor) and value.dim() and len(value) == rows else None
        for name, value in batch.items()
    }
    return [
        {name: batch[name] if parts is None else parts[place] for name, parts in cut.items()} for place in range(count)
    ]


def full_logits(logits: Tensor, runner: Runner, head: nn.Parameter, cut: SequenceCut) -> Tensor:
    """Returns the logits of all ranks [batch, sequence, vocabulary], with the padding of the sequence cut, from the
    logits of this rank [tokens, batch, slice of the vocabulary]. Collective."""
    placed, cp = runner.rank_units.rows[head].cut, runner.mesh.cp
    tp, length = runner.mesh.axis_of(placed), placed.length
    if tp.size > 1:
        lengths = [last - first for first, last in (cut_bounds(length, tp.size, r) for r in range(tp.size))]
        padded = nn.functional.pad(logits, (0, max(lengths) - logits.shape[-1]))
        gathered, work = prepare_all_gather(tp, padded)
        work()
        blocks = gathered.chunk(tp.size)
        logits = torch.cat([block[..., :length] for block, length in zip(blocks, lengths, strict=True)], -1)
    if cp.size > 1:
        gathered, work = prepare_all_gather(cp, logits)
        work()
        logits = cut.join(gathered)
    return logits.transpose(0, 1).contiguous()
