"""A cut decoder that the caller's own loss calls: a node of autograd whose backward pass is deferred.

In:   the arguments of a call of the decoder: ids, masks, positions.
Out:  the decoder's output and, for a call that asks, all hidden states and the logits of its routers: ordinary tensors,
      equal on every rank of a batch.
Must hold: in a training step, `.backward()` of anything computed from them only stores their gradients. The backward
pass runs overlapped with the next call's forward pass, or in `finish`, which completes the gradients. Calls elsewhere
leave nothing behind. Code above the decoder is the caller's and runs unchanged on every rank.

    call 1     F1         the caller computes a loss; .backward() stores the gradient of the output
    call 2     F2 | B1    the backward pass of call 1 overlaps with the forward pass of call 2
    finish     B2         with the gradient reductions

`hf_helix.planning.plan.call_programs` makes the three programs, `hf_helix.runtime.deferred_backward` runs them.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from hf_helix.engine.cut.compared_losses import ComparedLosses
from hf_helix.engine.cut.evaluate import split_rows
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker
from hf_helix.models.direct_use import replace_method
from hf_helix.models.graph.balance import routers_of
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.operators.communication.collectives import prepare_all_gather
from hf_helix.operators.communication.transport import Axis
from hf_helix.planning.window.layout import Key
from hf_helix.runtime.deferred_backward import DecoderCall, DeferredBackward
from hf_helix.runtime.divided import (
    is_recording,
    is_running_model_code,
    plain_parameters,
    recording,
    running_model_code,
)
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner, forget_gradients, set_aside

_READ = ("input_ids", "attention_mask", "position_ids")
"""The arguments of a decoder that a call reads."""

_WITHOUT_EFFECT = ("use_cache", "return_dict", "cache_position", "num_items_in_batch", "labels", "shift_labels")
"""Arguments without effect on the output of the decoder."""

_HIDDEN, _ROUTERS, _ATTENTIONS = "output_hidden_states", "output_router_logits", "output_attentions"
"""Arguments that ask for further outputs; the model's configuration may ask by the same names."""


@dataclass
class DecoderOutput(MoeModelOutputWithPast):
    """The output of a call, with the fields of every decoder of Transformers."""

    cross_attentions: Any = None


OpenWindow = Callable[[Sequence[MicroBatch]], AbstractContextManager[object]]


@dataclass(frozen=True)
class Decoding:
    """The calls of the decoder outside of steps, see `hf_helix.engine.calls`.

    Attributes:
        run: runs a function with its arguments, by turns if ranks have different ones.
        is_together: whether every rank calls the decoder alike.
    """

    run: Callable[..., Any]
    is_together: Callable[[], bool]


class CalledDecoder:
    """Calls of a cut decoder.

    Args:
        runner: the runner of the cut model, whose last unit gives the decoder's output.
        maker: makes micro-batches.
        check: called with the batch of every call of the model, before it runs. Collective.
        open_window: returns the context of a window, from its micro-batches, which grow until the window ends.
        calls: the calls outside of steps; None if every rank calls the decoder alike.

    Attributes:
        step: the number of the optimizer step, a seed of randomness.
        window: the micro-batches of the calls of the last window in a training step.
        losses: the losses of the window, for the comparison of ranks that share its batches.
        is_open: whether the window has not ended.
    """

    def __init__(
        self,
        runner: Runner,
        maker: WindowMaker,
        check: Callable[[Mapping[str, Any]], object] = lambda batch: None,
        open_window: OpenWindow | None = None,
        calls: Decoding | None = None,
    ) -> None:
        self.step = 0
        self.deferred_backward = DeferredBackward(runner)
        self.runner = runner
        self._maker = maker
        self._check = check
        self._open_window = open_window or (lambda window: set_aside(runner))
        self._calls = calls or Decoding(_run_alike, lambda: True)
        self._cut = SequenceCut.of(runner.mesh.tp, runner.mesh.cp)
        self.window: list[MicroBatch] = []
        self.losses = ComparedLosses(runner.mesh)
        self._kinds: dict[Key, tuple[Sequence[int], torch.dtype]] = {}  # of a token, as calls have returned them
        self._open = contextlib.ExitStack()
        self.is_open = False
        self._num_calls = 0
        self._num_routers = 0
        self._is_last_normed = True

    def put_into(self, decoder: nn.Module) -> None:
        """Replaces the `forward` of a decoder, the submodule of the cut model that runs the layers."""
        parameters = inspect.signature(decoder.forward)
        rest = next((each.name for each in parameters.parameters.values() if each.kind is each.VAR_KEYWORD), "")
        config = getattr(decoder, "config", None)
        self.deferred_backward.modules = list(decoder.modules())
        self._num_routers = len(routers_of(decoder))
        self._is_last_normed = getattr(config, "tie_last_hidden_states", True) is not False

        def forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_running_model_code():
                return stock(*args, **kwargs)
            named = dict(parameters.bind(*args, **kwargs).arguments)
            named |= named.pop(rest, {})
            given = {name: value for name, value in named.items() if value is not None}
            for name in (_HIDDEN, _ROUTERS, _ATTENTIONS):
                given.setdefault(name, getattr(config, name, False))
            if not torch.is_grad_enabled() and (self._stray(given) or given.get("use_cache")):
                return self._calls.run(stock, args, kwargs)
            if self._calls.is_together():
                return self._forward(given)
            return self._calls.run(stock, args, kwargs, alike=lambda *_, **__: self._forward(given))

        replace_method(decoder, "forward", forward)

    def _forward(self, given: Mapping[str, Any]) -> DecoderOutput:
        if given.get("inputs_embeds") is not None:
            raise ValueError(
                "the decoder is called with inputs_embeds, by the caller or by the model's own code (of "
                "images and text): a loss of one's own is built for input_ids; use the built-in loss, or call a text "
                "model with input_ids"
            )
        if stray := self._stray(given):
            raise ValueError(
                f"the model is called with gradients and {', '.join(stray)}: a call takes {', '.join(_READ)}, "
                f"{_HIDDEN}=True and, of a mixture whose routers are followed, {_ROUTERS}=True (attention weights are "
                "never computed); leave it out, or call the model under torch.no_grad()"
            )
        batch = {name: given[name] for name in _READ if name in given}
        self._check(batch)
        hidden = self.deferred_backward.hidden if given[_HIDDEN] else []
        hidden = hidden[:-1] if self._is_last_normed else hidden
        routers = self.deferred_backward.routers if given[_ROUTERS] else []
        output, *others = self.outputs(batch, (*hidden, *routers))
        states, logits = tuple(others[: len(hidden)]), tuple(others[len(hidden) :])
        return DecoderOutput(
            last_hidden_state=output,
            hidden_states=(*states, *((output,) if self._is_last_normed else ())) if given[_HIDDEN] else None,
            router_logits=logits if given[_ROUTERS] else None,
        )

    def _stray(self, given: Mapping[str, Any]) -> list[str]:
        """Returns the arguments of a call that the cut decoder does not read."""
        routers = self.deferred_backward.routers
        followed = [_ROUTERS] if routers and len(routers) == self._num_routers else []
        known, asks = (*_READ, *_WITHOUT_EFFECT), (_HIDDEN, *followed)
        missing = [] if "input_ids" in given else ["no input_ids"]
        return missing + [
            f"{name}={value}" if isinstance(value, int) else name
            for name, value in given.items()
            if name not in known and value is not False and not (name in asks and value is True)
        ]

    def outputs(self, batch: Mapping[str, Any], asked: tuple[Key, ...] = ()) -> list[Tensor]:
        """Returns the decoder's output for a batch [batch, sequence, hidden], and values that a call asks for; in a
        training step under autograd if gradients are on. Collective.

        Args:
            batch: tensors with a row for each sequence.
            asked: values of `DeferredBackward`: of `hidden` [batch, sequence, hidden], of `routers` [batch * sequence,
                experts].
        """
        length, trains = batch["input_ids"].shape[1], torch.is_grad_enabled() and is_recording()
        if trains and not self.is_open:
            self._begin()
        is_split = not trains or self.runner.mesh.pipe.size > 1
        batches = split_rows(batch, self.runner) if is_split else [batch]
        rows = [len(each["input_ids"]) for each in batches]
        pieces, keys = self._pieces(batches), (self.deferred_backward.output, *asked)
        anchor = torch.zeros((), device=self.runner.mesh.device, requires_grad=True)  # makes autograd call `backward`
        if not trains:
            values = self.deferred_backward.evaluate(pieces, asked)
            whole = [self._whole(key, values.get(key), rows, length) for key in keys]
            return list(_OutsideOfSteps.apply(anchor, *whole))
        call, values = self.deferred_backward.forward(pieces, asked)
        outputs: Sequence[Tensor | None] = values.get(self.deferred_backward.output) or [None] * len(pieces)
        self.window += [replace(piece, output=_outline(output)) for piece, output in zip(pieces, outputs, strict=True)]
        joined = [self._whole(key, values.get(key), rows, length) for key in keys]
        return list(_Outputs.apply(anchor, self, call, rows, keys, *joined))

    @contextlib.contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Returns the context of a training step, within which losses have backward passes. An error ends the window.

        Args:
            step: the number of the optimizer step.
        """
        self.step = step
        try:
            with recording():
                yield
        except BaseException:
            self.drop()
            raise

    def finish(self) -> None:
        """Ends a window: compares its losses, runs the backward passes that wait and reduces the gradients. Collective.

        Raises:
            ValueError: the losses of ranks that share a batch differ.
        """
        if not self.is_open:
            return
        try:
            self.losses.check()
        except BaseException:
            self.drop()
            raise
        with self._open:
            self.is_open, self._num_calls = False, 0
            self.deferred_backward.finish()

    def use(self, runner: Runner) -> None:
        """Runs further windows by the plan of another runner of the same parameters."""
        if runner is not self.runner:
            num_fused = self.deferred_backward.num_fused
            self.runner, self.deferred_backward = runner, DeferredBackward(runner, self.deferred_backward.modules)
            self.deferred_backward.num_fused = num_fused

    def drop(self) -> None:
        """Ends a window without its gradients, as after an error."""
        self.deferred_backward.drop()
        if self.is_open:
            with plain_parameters():
                forget_gradients(self.runner)
        self._open.close()
        self.is_open, self._num_calls = False, 0

    def _begin(self) -> None:
        self.window = []
        self.losses.forget()
        self._open.enter_context(self._open_window(self.window))
        self.is_open = True

    def _pieces(self, batches: Sequence[Mapping[str, Any]]) -> list[MicroBatch]:
        scale = LossScale(torch.ones((), device=self.runner.mesh.device))
        first, self._num_calls = self._num_calls, self._num_calls + len(batches)
        return [self._maker.microbatch(batch, scale, (self.step, first + place)) for place, batch in enumerate(batches)]

    def _whole(self, key: Key, pieces: Sequence[Tensor] | None, rows: Sequence[int], length: int) -> Tensor:
        """Returns a value of a call on every rank, see `outputs`.

        Args:
            key: the value.
            pieces: the tensors of the call's pieces, on the rank with the unit; elsewhere None.
            rows: the number of rows of each piece.
            length: of the sequence.
        """
        is_flat, value = key in self.deferred_backward.routers, None
        if pieces is not None:
            parts = zip(pieces, rows, strict=True)
            value = torch.cat([piece.unflatten(0, (-1, count)) if is_flat else piece for piece, count in parts], 1)
            for axis in self._axes_of(key):
                value, transfer = prepare_all_gather(axis, value)
                transfer()
            value = self._cut.join(value)
        known = self._kinds.get(key)
        kind = None if known is None else ((self._cut.padded(length), sum(rows), *known[0]), known[1])
        shared = self.runner.share(value, key[0], kind)
        self._kinds[key] = shared.shape[2:], shared.dtype
        whole = shared[:length].transpose(0, 1)
        return whole.flatten(0, 1) if is_flat else whole.contiguous()

    def _axes_of(self, key: Key) -> list[Axis]:
        """Returns the axes that a value of a unit is cut over."""
        mesh = self.runner.mesh
        return [axis for axis in (mesh.tp, mesh.cp) if axis.size > 1 and key != self.deferred_backward.output]

    def take_gradient(self, call: DecoderCall, rows: Sequence[int], key: Key, gradient: Tensor) -> None:
        """Stores the gradient of a value of a call, on the rank with its unit.

        Args:
            call: the call.
            rows: the number of rows of each of its pieces.
            key: the value.
            gradient: of the value as the call returned it.
        """
        is_flat, given = key in self.deferred_backward.routers, {}
        self.losses.add_gradient(gradient)
        if self.deferred_backward.is_here(key):
            value = gradient.unflatten(0, (sum(rows), -1)) if is_flat else gradient
            value = self._cut.parted(value.transpose(0, 1))
            for axis in reversed(self._axes_of(key)):
                value = value.chunk(axis.size)[axis.rank]
            given[key] = [each.flatten(0, 1) if is_flat else each.contiguous() for each in value.split(rows, 1)]
        self.deferred_backward.backward(call, given)


def _run_alike(stock: Callable[..., Any], args: Any, kwargs: Any, alike: Callable[..., Any] | None = None) -> Any:
    with running_model_code():
        return stock(*args, **kwargs)


def _outline(value: Tensor | None) -> Tensor | None:
    return None if value is None else torch.empty_like(value, device="meta")


class _Outputs(torch.autograd.Function):
    """The values of a call of the decoder, its output first."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, called_decoder: CalledDecoder, call: DecoderCall, *rest: Any
    ) -> tuple[Tensor, ...]:
        rows, keys, *values = rest
        ctx.called_decoder, ctx.call, ctx.rows, ctx.keys, ctx.first = called_decoder, call, rows, keys, values[0]
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        first, *others = gradients
        first = torch.zeros_like(ctx.first) if first is None else first
        for key, gradient in zip(ctx.keys, (first, *others), strict=True):
            if gradient is not None:
                ctx.called_decoder.take_gradient(ctx.call, ctx.rows, key, gradient)
        return (None,) * (5 + len(gradients))


class _OutsideOfSteps(torch.autograd.Function):
    """The values of a call outside of a training step, which keeps nothing for a backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            ".backward() of a loss outside of a training step, where the cut model keeps no activations: compute the "
            "loss in compute_loss, or run trainer.training_step(model, inputs), which leaves gradients"
        )
