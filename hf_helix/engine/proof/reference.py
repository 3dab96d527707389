"""The reference of a proof: the unsplit model, and weights and batches that reveal mistakes.

In:   a small Transformers model with the weights of its initialisation.
Out:  the same model with larger and less regular weights; batches by kind; losses, gradients by name and logits of the
      unsplit model, on demand in fp64.
Must hold: equal on every rank. Activations are large enough for caps and windows to matter and small enough for fp32;
no norm, bias, scale or sink is at a constant that would hide its absence. Nothing of hf_helix computes the reference,
and the given model is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_helix.checkpoint.reader import persistent_tensors
from hf_helix.models.derived.model_code import has_stock_loss
from hf_helix.models.stock.causal_lm import has_towers, is_stock
from hf_helix.models.stock.copies import copy_module
from hf_helix.models.trace.calls import Decoder
from hf_helix.operators.vocabulary.loss import IGNORED

Batch = dict[str, Tensor]

ROWS, LEFT, RIGHT, PACKED = "rows", "padded left", "padded right", "packed"
KINDS = (ROWS, LEFT, RIGHT, PACKED)
LENGTHS = (21, 14)
"""The lengths of the sequences of a window: neither divides among the ranks of tp 2 x cp 2, the second among two."""

RECURRENT_LENGTHS = (21, 134)
"""The lengths for models with recurrent layers: the second is over two chunks of their kernels, which compute 64 tokens
at once, and divides as 14 does."""

ITEMS = 64
"""The divisor of losses in every window, so that losses and gradients of batches add up."""

MOVES = 4
"""The number of random moves of the weights: a gradient's change near a bend shows in some moves only."""

GAIN = 2.0
USUAL_GAIN = 0.25
"""The factor from matrices with this gain to matrices of the usual size, under which rounding grows as in training."""

SPREAD = 0.3


@torch.no_grad()
def scale_weights(model: nn.Module, seed: int = 0) -> None:
    """Gives matrices a gain of about 2 (three to five times the usual gain), and moves all vectors and scalars.

    The model is changed in place, persistent buffers (such as the biases of routers) included; the result depends on
    `seed` and on the shapes only.
    """
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *_saved_buffers(model)):
        drawn = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        if tensor.dim() < 2:
            tensor.add_(drawn, alpha=SPREAD)
            continue
        if not tensor.any():
            tensor.copy_(drawn)
        # The dimension of the inputs is among the last two: another for linears than for experts.
        fan = math.sqrt(tensor.shape[-1] * tensor.shape[-2])
        tensor.mul_(GAIN / math.sqrt(fan) / tensor.square().mean().sqrt())


def _saved_buffers(model: nn.Module) -> list[Tensor]:
    """Returns the floating-point buffers of checkpoints, each once. Other buffers, such as ropes, are constants."""
    buffers = set(map(id, model.buffers()))
    saved = {id(tensor): tensor for tensor in persistent_tensors(model).values()}
    return [tensor for key, tensor in saved.items() if key in buffers and tensor.is_floating_point()]


def make_batches(
    kind: str, vocab_size: int, pad: int, device: torch.device, place: int = 0, lengths: Sequence[int] = LENGTHS
) -> list[Batch]:
    """Returns the batches of a window of a kind, as a data collator makes them, for the data-parallel rank `place`."""
    generator = torch.Generator().manual_seed(1 + KINDS.index(kind) + len(KINDS) * place)
    made = [_make_batch(kind, length, vocab_size, pad, generator, length == min(lengths)) for length in lengths]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in made]


def _make_batch(
    kind: str, length: int, vocab_size: int, pad: int, generator: torch.Generator, is_shortest: bool
) -> Batch:
    """Two rows of random tokens, most of them in the loss; with padding, the second row is padded."""
    ids = torch.randint(0, vocab_size, (2, length), generator=generator)
    labels = ids.masked_fill(torch.rand(2, length, generator=generator) < 0.1, IGNORED)
    batch = {"input_ids": ids, "labels": labels}
    if kind in (LEFT, RIGHT):
        _hide(batch, kind, pad, is_shortest)
    if kind == PACKED:
        positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])
        batch["position_ids"] = positions.expand(2, -1).contiguous()
    return batch


def _hide(batch: Batch, kind: str, pad: int, is_shortest: bool) -> None:
    """Hides half of the second row and, with padding on the left, tokens inside of the first. Labels of hidden tokens
    count, except for padding on the right in the shortest batch, as most collators make it."""
    mask = torch.ones_like(batch["input_ids"])
    length = mask.shape[1]
    if kind == LEFT:
        mask[1, : length // 2] = mask[0, length // 3 : length // 2] = 0
    else:
        mask[1, length // 2 :] = 0
    batch |= {"attention_mask": mask, "input_ids": batch["input_ids"].where(mask > 0, pad)}
    if kind == RIGHT and is_shortest:
        batch["labels"] = batch["labels"].where(mask > 0, IGNORED)


def ends_at_decoder(model: Any) -> bool:
    """Returns whether the output of the decoder is compared: a model has no language-model head, a loss of its own, or
    more than a head above its decoder and is no language model of Transformers."""
    head = model.get_output_embeddings()
    if has_towers(model) or is_stock(model):
        return head is None or not has_stock_loss(model)
    known = {*Decoder(model).module.parameters(), *model.get_input_embeddings().parameters()}
    return head is None or not known.union(head.parameters()).issuperset(model.parameters())


def inputs_of(batch: Batch) -> Batch:
    """Returns a batch as arguments of a decoder."""
    return {name: value for name, value in batch.items() if name != "labels"}


def loss_of_output(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns a loss of a decoder's output, and the output without padding, [batch, sequence, hidden]."""
    mask = batch.get("attention_mask")
    read = output if mask is None else output * (mask != 0).unsqueeze(-1)
    weights = torch.arange(output.shape[-1], device=output.device, dtype=output.dtype).cos()
    return (read * weights).sum() / ITEMS, read


# -- the unsplit model -----------------------------------------------------------------------------------------------


Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """The results of a model for the batches of a window.

    Attributes:
        losses: the loss of every batch.
        gradients: the gradients of the sum of the losses, by parameter name, in fp64 on the host.
        logits: the logits of the first batch [batch, sequence, vocabulary].
    """

    losses: tuple[float, ...]
    gradients: Gradients
    logits: Tensor


class Unsplit:
    """A copy of an unsplit model, which runs every batch once.

    Args:
        model: the model.
        device: the device of the copy.
        dtype: the type of its weights and activations.

    Attributes:
        model: the copy.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.model = copy_module(model).to(device=device, dtype=dtype)
        self._known: dict[int, tuple[Batch, Outcome]] = {}  # by identity; the batch is kept, so that it stays unique
        self._exact: Unsplit | None = None
        self._moved: list[Unsplit] = []

    def exact(self) -> Unsplit:
        """Returns the same model in fp64."""
        if self._exact is None:
            self._exact = Unsplit(self.model, self.model.device, torch.float64)
            self._exact.model.set_experts_implementation("eager")  # grouped products have no fp64
        return self._exact

    def moved(self) -> list[Unsplit]:
        """Returns the same model several times, with every weight one step of its type up or down, at random."""
        for seed in range(len(self._moved), MOVES):
            other = Unsplit(self.model, self.model.device)
            generator = torch.Generator().manual_seed(seed)
            for parameter in other.model.parameters():
                up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
                parameter.data = torch.nextafter(parameter.data, torch.where(up, math.inf, -math.inf))
            self._moved.append(other)
        return self._moved

    def run(self, batches: Sequence[Batch]) -> Outcome:
        """Returns the losses, the sum of the gradients, and the logits of the first batch. Parameters that no batch
        uses, such as a tower's, have no gradient: zeros for each batch could be larger than all else."""
        outcomes = [self._run_one(batch) for batch in batches]
        gradients = add_up(outcome.gradients for outcome in outcomes)
        return Outcome(tuple(outcome.losses[0] for outcome in outcomes), gradients, outcomes[0].logits)

    def draws(self, batch: Batch) -> bool:
        """Returns whether the model draws random numbers: two runs of a batch differ by more than rounding."""
        losses = []
        with torch.no_grad():
            for seed in (1, 2):
                torch.manual_seed(seed)
                losses.append(float(self._forward(batch)[0]))
        return abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0])

    def _run_one(self, batch: Batch) -> Outcome:
        if id(batch) in self._known:
            return self._known[id(batch)][1]
        self.model.zero_grad()
        loss, logits = self._forward(batch)
        loss.backward()
        gradients = {name: p.grad.double().cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        outcome = Outcome((float(loss.detach()),), gradients, logits.detach().double().cpu())
        self._known[id(batch)] = batch, outcome
        return outcome

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the logits; of a model without a head a loss of the decoder's output, and the output."""
        # As the Trainer does: with a cache, Transformers does not look for documents in a row.
        if ends_at_decoder(self.model):
            return loss_of_output(Decoder(self.model).module.forward(**inputs_of(batch), use_cache=False)[0], batch)
        out = self.model(**batch, num_items_in_batch=ITEMS, use_cache=False)
        return out.loss, out.logits


def add_up(parts: Iterable[Gradients]) -> dict[str, Tensor]:
    """Returns the sum of gradients, name by name."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
