"""Losses of one's own on logits divided over the vocabulary, and the fused head, against the same code on full ones."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.cluster import Cluster
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils as trl_utils
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from hf_helix.integrations.trainer.references import cut_fused_head
from hf_helix.operators.communication.transport import Axis, GlooTransport
from hf_helix.operators.vocabulary import logits as vocab_logits
from hf_helix.operators.vocabulary.log_probs import HeadOptions, vocab_log_probs
from hf_helix.operators.vocabulary.logits import VocabLogits, divided_logits, summed_gradient
from hf_helix.operators.vocabulary.slices import sliced_linear
from hf_helix.planning.parameters import TP, Cut, Parameter, Part, Place, Ranks, Sharers, cut_bounds
from hf_helix.runtime.division import Division

VOCABULARY, HIDDEN, ROWS, LENGTH = 131, 16, 2, 7
Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""A loss of logits, labels, and other logits, which are whole or divided as the first."""


def _causal(logits: Any, labels: Tensor, other: Any) -> Any:
    return ForCausalLMLoss(logits, labels, VOCABULARY, num_items_in_batch=torch.tensor(5))


def _smoothed(logits: Any, labels: Tensor, other: Any) -> Any:
    return LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=True)


def _z_loss(logits: Any, labels: Tensor, other: Any) -> Any:
    return ForCausalLMLoss(logits, labels, VOCABULARY) + 1e-2 * logits.logsumexp(-1).square().mean()


def _focal(logits: Any, labels: Tensor, other: Any) -> Any:
    each = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum()


def _weighted(logits: Any, labels: Tensor, other: Any) -> Any:
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=logits.dtype)
    loss = torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    return loss(logits.view(-1, VOCABULARY), labels.view(-1))


def _negative(logits: Any, labels: Tensor, other: Any) -> Any:
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=logits.dtype)
    return functional.nll_loss(logits.reshape(-1, VOCABULARY).log_softmax(-1), labels.flatten(), weight)


def _distilled(logits: Any, labels: Tensor, other: Any) -> Any:
    student = functional.log_softmax(logits / 2.0, dim=-1)
    return functional.kl_div(student, functional.softmax(other / 2.0, dim=-1), reduction="batchmean")


def _plain_teacher(logits: Any, labels: Tensor, other: Any) -> Any:
    other = other.full() if isinstance(other, VocabLogits) else other
    teacher = other.detach().log_softmax(-1)
    student = logits.log_softmax(-1)
    return functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)[labels != -100].mean()


def _entropy(logits: Any, labels: Tensor, other: Any) -> Any:
    return entropy_from_logits(logits, chunk_size=4).sum()


def _entropy_of_softmax(logits: Any, labels: Tensor, other: Any) -> Any:
    chances = torch.softmax(logits, -1)
    return (torch.logsumexp(logits, dim=-1) - torch.sum(chances * logits, dim=-1)).mean()


def _selected(logits: Any, labels: Tensor, other: Any) -> Any:
    return (selective_log_softmax(logits, labels.clamp(min=0), temperature=0.7) * (labels != -100)).sum()


def _masked(logits: Any, labels: Tensor, other: Any) -> Any:
    kept = labels != -100
    chosen = logits[kept]
    return (chosen.logsumexp(-1) - chosen[torch.arange(len(chosen)), labels[kept]]).mean() + logits[..., 100].sum()


def _accuracy(logits: Any, labels: Tensor, other: Any) -> Any:
    best, place = logits.max(-1)
    return (logits.argmax(dim=-1) == place).sum() + place.float().mean() + best.mean() + logits.amax(-1).sum()


def _written(logits: Any, labels: Tensor, other: Any) -> Any:
    logits = logits.clone()
    logits /= 0.5
    logits[:, -1] = 0.25
    logits.masked_fill_(labels.eq(-100).unsqueeze(-1), 0.5)
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1).clamp(min=0))


def _hidden_tokens(logits: Any, labels: Tensor, other: Any) -> Any:
    logits = logits + torch.zeros(VOCABULARY, dtype=logits.dtype).index_fill(0, torch.arange(70), -torch.inf)
    return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1).clamp(min=80))


def _mixed(logits: Any, labels: Tensor, other: Any) -> Any:
    pair = torch.stack([logits.log_softmax(-1), other.log_softmax(-1)])
    mean, joined = torch.logsumexp(pair, dim=0), torch.cat([logits, other])[1:]
    capped = 5 * torch.tanh(joined.float() / 5)
    return (mean.exp() * (mean - pair[0])).sum() + capped.mean() + (capped > 1).sum() + capped[0, :, :].std(dim=0).sum()


def _top(logits: Any, labels: Tensor, other: Any) -> Any:
    logits[..., 3] = 1.0
    return logits.topk(3, dim=-1).values.sum() + functional.cross_entropy(logits.transpose(1, 2), labels)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * gradients[0]


def _past_the_tensor(logits: Any, labels: Tensor, other: Any) -> Any:
    """Functions that read the tensor below `__torch_function__`; hooks; autocast."""
    total = _Square.apply(logits)
    parts = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    logits.retain_grad()
    logits.logsumexp(-1).sum().backward(retain_graph=True)
    kept = logits.grad.square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        types = [loss.dtype, logits.sum(-1).dtype, logits.softmax(-1).dtype]
    assert "VocabLogits" in f"{logits}" or type(logits) is Tensor
    assert (logits.requires_grad, logits.grad_fn is None, logits.detach().requires_grad) == (True, False, False)
    assert (len(logits), logits.shape[-1], logits.size(-1)) == (ROWS, VOCABULARY, VOCABULARY)
    leaf = logits.detach().requires_grad_()
    (leaf.softmax(-1)[..., 0] * leaf[..., 100]).sum().backward()
    exact = sum(each is torch.float32 for each in types)
    return total.sum() + parts[-1].sum() + kept + loss + leaf.grad.square().sum() + exact


LOSSES: list[Loss] = [_causal, _smoothed, _z_loss, _focal, _weighted, _negative, _distilled, _plain_teacher, _entropy]
LOSSES += [_entropy_of_softmax, _selected, _masked, _accuracy, _written, _hidden_tokens, _mixed]
GATHERED: list[Loss] = [_top, _past_the_tensor]


def _values(dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH))
    labels[0, :3] = labels[1, -1] = -100
    hidden, weight, bias = torch.randn(ROWS, LENGTH, HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY)
    return SimpleNamespace(labels=labels, hidden=hidden.to(dtype), weight=weight.to(dtype), bias=bias.to(dtype))


def _outcome(loss: Loss, dtype: torch.dtype, axis: Axis) -> dict[str, Tensor]:
    """The loss and its gradients, those of weights over this rank's rows."""
    values = _values(dtype)
    first, end = cut_bounds(VOCABULARY, axis.size, axis.rank)
    leaves = [values.hidden, values.weight[first:end].clone(), values.bias[first:end].clone()]
    hidden, weight, bias = (each.requires_grad_() for each in leaves)

    def logits(scale: float) -> Tensor:
        return divided_logits(functional.linear(summed_gradient(hidden * scale, axis), weight, bias), axis, VOCABULARY)

    result = loss(logits(0.3), values.labels, logits(0.1))
    assert type(result) is Tensor
    result.float().backward()
    gradients = [hidden.grad, *(_rows(each.grad, axis) for each in (weight, bias))]
    return {"loss": result.detach().float(), **dict(zip(("hidden", "weight", "bias"), gradients, strict=True))}


def _rows(gradient: Any, axis: Axis) -> Tensor:
    whole = torch.zeros(VOCABULARY, *gradient.shape[1:], dtype=torch.float32)
    first, end = cut_bounds(VOCABULARY, axis.size, axis.rank)
    whole[first:end] = gradient
    if axis.size > 1:
        dist.all_reduce(whole)
    return whole


def _axis() -> Axis:
    return Axis(GlooTransport(dist.group.WORLD, dist.new_group()))


ALL = ROWS * LENGTH * VOCABULARY
FIGURES = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _fused(
    dtype: torch.dtype, axis: Axis, outputs: tuple[str, ...] = FIGURES, kept: int = 0, **options: Any
) -> dict[str, Tensor]:
    """The fused head and gradients of what it gives: TRL's on one rank, ours on several."""
    values = _values(dtype)
    first, end = cut_bounds(VOCABULARY, axis.size, axis.rank)
    leaves = [values.hidden.flatten(0, 1), values.weight[first:end].clone(), values.bias[first:end].clone()]
    hidden, weight, bias = (each.requires_grad_() for each in leaves)
    options = {"temperature": 0.7, "softcap": 3.0, "scale": 0.4, **options}
    targets = values.labels.flatten().clamp(min=0)
    targets[0] = (values.hidden.flatten(0, 1)[0] @ values.weight.t() + values.bias).argmax()
    if axis.size > 1:
        head = HeadOptions(outputs=outputs, rows=23, kept=kept, **options)
        found = vocab_log_probs(hidden, weight, bias, targets, axis, VOCABULARY, head)
    else:
        found = ChunkedLogProbFunction.apply(hidden, weight, bias, targets, options["temperature"], 32,
            options["softcap"], options["scale"], outputs)  # fmt: skip
    factors = torch.linspace(0.5, 2, len(targets))
    entropy = 0 if found[1] is None else (found[1] * factors.flip(0)).sum()
    ((found[0] * factors).sum() + entropy).backward()
    result = dict(zip(("log_probs", *FIGURES), found, strict=True))
    result |= {"hidden": hidden.grad, "weight": _rows(weight.grad, axis), "bias": _rows(bias.grad, axis)}
    return {name: value.detach().float() for name, value in result.items() if value is not None}


def _hooked(dtype: torch.dtype, axis: Axis, pipe: Any) -> list[tuple[Tensor, Tensor]]:
    """The same through TRL's name of its fused head, for a head over tensor-parallel ranks or on one pipeline rank."""
    values, rank = _values(dtype), dist.get_rank()
    pipe.rank, owner = (0, 0) if pipe.group is None else (rank, 1)
    mesh: Any = SimpleNamespace(tp=axis, cp=Axis.single(), pipe=pipe, axis_of=lambda cut: axis)
    shape, ranks = tuple(values.weight.shape), Ranks(axis.size, axis.rank)
    row = Parameter("head", shape, cut=Cut(0, shape[0]), owner=owner, is_above=True)
    division = Division(Part(row, Place({TP: Sharers(ranks)}, pipe.rank)), mesh)
    first, end = cut_bounds(VOCABULARY, axis.size, axis.rank)
    rows = slice(first, end if division.is_here else first)
    hidden, weight, bias = (nn.Parameter(each) for each in (values.hidden[0], values.weight[rows], values.bias[rows]))
    weight._division = division  # type: ignore[attr-defined]
    targets = values.labels[0].clamp(min=0)
    found = trl_utils._ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 5.0, 32, None, 1.0, FIGURES)
    (found[0] - found[1]).sum().backward()
    plain = [each.detach().requires_grad_() for each in (values.hidden[0], values.weight, values.bias)]
    expected = ChunkedLogProbFunction.apply(*plain, targets, 5.0, 32, None, 1.0, FIGURES)
    (expected[0] - expected[1]).sum().backward()
    gradients = [(hidden.grad, plain[0].grad * division.is_here), (weight.grad, plain[1].grad[rows])][
        : 1 + division.is_here
    ]
    return [(ours.float(), whole.float()) for ours, whole in [*zip(found, expected, strict=True), *gradients]]


def _of_a_vector(axis: Axis) -> dict[str, Tensor]:
    """A loss of the logits of a single token, and its gradients."""
    values, (first, end) = _values(torch.float32), cut_bounds(VOCABULARY, axis.size, axis.rank)
    hidden, weight = nn.Parameter(values.hidden[0, 0]), nn.Parameter(values.weight[first:end].clone())
    logits = sliced_linear(hidden, weight, None, axis)
    logits.square().sum().backward()
    return {"logits": _rows(logits.detach(), axis), "hidden": hidden.grad, "weight": _rows(weight.grad, axis)}


def _differences(ours: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, float]:
    assert ours.keys() == whole.keys()
    scales = {name: value.abs().max().clamp(min=1e-3) for name, value in whole.items()}
    return {name: ((value - whole[name]).abs().max() / scales[name]).item() for name, value in ours.items()}


def losses() -> dict[str, Any]:
    """Differences of every loss and its gradients from those on whole logits, by name and type."""
    said: list[str] = []
    vocab_logits.on_gather = said.append
    axis, alone, found = _axis(), Axis.single(), {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        for loss in [*LOSSES, *GATHERED]:
            vocab_logits.gathers.clear()
            found[loss.__name__, kind] = _differences(_outcome(loss, dtype, axis), _outcome(loss, dtype, alone))
            assert bool(vocab_logits.gathers) == (loss in GATHERED), (loss, vocab_logits.gathers)
        plain = {"softcap": None, "scale": 1.0, "temperature": 1.0}
        for options in ({}, {"kept": ALL}, {"softcap": None, "outputs": ("is_top1",)}, {"kept": ALL, **plain}, plain):
            found[f"fused {options}", kind] = _differences(
                _fused(dtype, axis, **options), _fused(dtype, alone, **options)
            )
    found["vector", "float32"] = _differences(_of_a_vector(axis), _of_a_vector(alone))
    cut_fused_head()
    for layout in ((axis, SimpleNamespace(group=None)), (alone, SimpleNamespace(group=dist.group.WORLD, ranks=[0, 1]))):
        pairs = _hooked(torch.float32, *layout)
        found[f"hooked, tp{layout[0].size}", "float32"] = {
            str(at): (a - b).abs().sum().item() / b.numel() for at, (a, b) in enumerate(pairs)
        }
        assert all(a.shape == b.shape for a, b in pairs)
    assert said[:2] == ["__setitem__", "all_gather"]
    return found


def test_losses_and_the_fused_head_are_those_of_whole_logits(cluster_of: Callable[[int], Cluster]) -> None:
    for found in cluster_of(2).run(losses):
        bounds = {"float32": 5e-6, "bfloat16": 6e-2}
        far = {key: each for key, each in found.items() if not max(each.values()) <= bounds[key[1]]}
        assert not far, "\n".join(f"{key}: {each}" for key, each in far.items())
