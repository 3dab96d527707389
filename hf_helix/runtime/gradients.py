"""Gradients over the ranks: sums at the end of a window, and the norm of the whole gradient.

In:   parameters with their placements, and the mesh.
Out:  complete gradients on every rank; one norm, equal on every rank.
Must hold: a parameter that several ranks copy counts once; the order of sums is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_helix.operators.collectives import Axis, GroupTransport
from hf_helix.operators.unit import Placement
from hf_helix.runtime.mesh import Mesh

BUCKET_BYTES = 25 * 2**20

Placements = Mapping[nn.Parameter, Placement]


def complete_gradients(placements: Placements, mesh: Mesh) -> None:
    """Sum what each rank saw of the sequence (tp), then average over the batches (dp)."""
    trained = [parameter for parameter in placements if parameter.grad is not None]
    group = tp_group(mesh.tp)
    if group is not None:
        _all_reduce([p.grad for p in trained if placements[p].sums_gradient], group)
    if mesh.dp_group is not None:
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        _all_reduce(gradients, mesh.dp_group)
        torch._foreach_div_(gradients, float(mesh.dp_size))


def gradient_norm(placements: Placements, mesh: Mesh) -> Tensor:
    """The 2-norm of the gradient of the whole model, as `torch.nn.utils.clip_grad_norm_` would return it."""
    trained = [parameter for parameter in placements if parameter.grad is not None]
    cut = _squares(p.grad for p in trained if placements[p].dim is not None).to(mesh.device)
    copied = _squares(p.grad for p in trained if placements[p].dim is None).to(mesh.device)
    group = tp_group(mesh.tp)
    if group is not None:
        dist.all_reduce(cut, group=group)
    return (cut + copied).sqrt()


def tp_group(axis: Axis) -> dist.ProcessGroup | None:
    """The process group of an axis; None where it has one rank."""
    return axis.transport.group if isinstance(axis.transport, GroupTransport) else None


def _squares(gradients: Iterable[Tensor | None]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
    return norm.float().square()


def _all_reduce(gradients: Sequence[Tensor | None], group: dist.ProcessGroup) -> None:
    for bucket in _buckets([gradient for gradient in gradients if gradient is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
