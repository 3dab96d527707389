"""The seam: a cut decoder that the model's own code calls, as a node of autograd with a lazy backward pass.

In:   the arguments of a call of the decoder: ids, masks, positions.
Out:  the decoder's output, an ordinary tensor [batch, sequence, hidden], equal on every rank of a batch.
Must hold: in a training step, `.backward()` of anything computed from the output only stores the output's gradient. The
backward pass runs overlapped with the next call's forward pass, or in `finish`, which completes the gradients. Calls
elsewhere leave nothing behind. Code above the decoder is the caller's and runs unchanged on every rank.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from hf_helix.engine.evaluate import split_rows
from hf_helix.engine.microbatches import LossScale, WindowMaker
from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.direct_use import replace_method
from hf_helix.runtime.divided import calling, is_calling, is_recording, recording
from hf_helix.runtime.gradients.reduce import set_aside
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.seam import CalledDecoder, DecoderCall

_READ = ("input_ids", "attention_mask", "position_ids")
"""The arguments of a decoder that a call reads."""

_WITHOUT_EFFECT = ("use_cache", "return_dict", "cache_position", "num_items_in_batch", "labels", "shift_labels")
"""Arguments without effect on the output of the decoder."""


@dataclass
class DecoderOutput(ModelOutput):
    """The output of a call, with the fields of every decoder of Transformers."""

    last_hidden_state: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    router_logits: Any = None


class Seam:
    """Calls of a cut decoder.

    Args:
        runner: the runner of the cut model, whose last unit gives the decoder's output.
        maker: makes micro-batches.
        check: called with the batch of every call of the model, before it runs. Collective.
        begin: called before the first call of a window that a backward pass may follow.
        running: the context in which the model's own code runs without gradients.

    Attributes:
        step: the number of the optimizer step, a seed of randomness.
    """

    def __init__(
        self,
        runner: Runner,
        maker: WindowMaker,
        check: Callable[[Mapping[str, Any]], object] = lambda batch: None,
        begin: Callable[[], object] = lambda: None,
        running: Callable[[], AbstractContextManager[object]] = calling,
    ) -> None:
        self.step = 0
        self.called = CalledDecoder(runner)
        self.runner = runner
        self._maker = maker
        self._check = check
        self._begin = begin
        self._running = running
        self._cut = SequenceCut.of(runner.mesh.tp, runner.mesh.cp)
        self._window: contextlib.ExitStack | None = None
        self._num_calls = 0

    def put_into(self, decoder: nn.Module) -> None:
        """Replaces the `forward` of a decoder, the submodule of the cut model that runs the layers."""
        parameters = inspect.signature(decoder.forward)
        rest = next((each.name for each in parameters.parameters.values() if each.kind is each.VAR_KEYWORD), "")

        def forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_calling():
                return stock(*args, **kwargs)
            named = dict(parameters.bind(*args, **kwargs).arguments)
            named |= named.pop(rest, {})
            given = {name: value for name, value in named.items() if value is not None}
            if torch.is_grad_enabled() or not (_stray(given) or given.get("use_cache")):
                return self._forward(given)
            with self._running():
                return stock(*args, **kwargs)

        replace_method(decoder, "forward", forward)

    def _forward(self, given: Mapping[str, Any]) -> DecoderOutput:
        if stray := _stray(given):
            raise ValueError(
                f"the model is called with gradients and {', '.join(stray)}: a call takes {', '.join(_READ)}; leave it "
                "out, or call the model under torch.no_grad()"
            )
        batch = {name: given[name] for name in _READ if name in given}
        self._check(batch)
        return DecoderOutput(last_hidden_state=self.output(batch))

    def output(self, batch: Mapping[str, Any]) -> Tensor:
        """Returns the decoder's output for a batch [batch, sequence, hidden]; in a training step under autograd where
        gradients are on. Collective."""
        length = batch["input_ids"].shape[1]
        if not (torch.is_grad_enabled() and is_recording()):
            output = self._joined(self.called.evaluate(self._pieces(split_rows(batch, self.runner))), length)
            alone: Tensor = _OutsideOfSteps.apply(self._anchor(), output)
            return alone
        if self._window is None:
            self._open()
        batches = split_rows(batch, self.runner) if self.runner.mesh.pipe.size > 1 else [batch]
        call, outputs = self.called.forward(self._pieces(batches))
        rows = [len(each["input_ids"]) for each in batches]
        hidden: Tensor = _Output.apply(self._anchor(), self, call, rows, self._joined(outputs, length))
        return hidden

    def _anchor(self) -> Tensor:
        """An input of an autograd function, so that autograd calls its `backward`."""
        return torch.zeros((), device=self.runner.mesh.device, requires_grad=True)

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
        """Ends a window: runs the backward passes that wait and reduces the gradients. Collective."""
        if self._window is None:
            return
        with self._window:
            self._window, self._num_calls = None, 0
            self.called.finish()

    def drop(self) -> None:
        """Ends a window without its gradients, as after an error."""
        self.called.drop()
        if self._window is not None:
            self._window.close()
            self._window, self._num_calls = None, 0

    def _open(self) -> None:
        self._begin()
        self._window = contextlib.ExitStack()
        self._window.enter_context(set_aside(self.runner.stage.stepped))

    def _pieces(self, batches: Sequence[Mapping[str, Any]]) -> list[MicroBatch]:
        scale = LossScale(torch.ones((), device=self.runner.mesh.device))
        first, self._num_calls = self._num_calls, self._num_calls + len(batches)
        return [self._maker.microbatch(batch, scale, (self.step, first + place)) for place, batch in enumerate(batches)]

    def _joined(self, outputs: Sequence[Tensor], length: int) -> Tensor:
        """Returns the output of a call on every rank, from the outputs of its pieces [sequence, rows, hidden]."""
        joined = self._cut.join(torch.cat(list(outputs), 1)) if outputs else None
        return self.runner.share(joined)[:length].transpose(0, 1).contiguous()

    def take_gradient(self, call: DecoderCall, rows: Sequence[int], gradient: Tensor) -> None:
        """Stores the gradient of the output of a call.

        Args:
            call: the call.
            rows: the number of rows of each of its pieces.
            gradient: [batch, sequence, hidden].
        """
        value = self._cut.parted(gradient.transpose(0, 1))
        self.called.backward(call, [each.contiguous() for each in value.split(rows, 1)])


def _stray(given: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of a call that the cut decoder does not read."""
    missing = [] if "input_ids" in given else ["no input_ids"]
    known = (*_READ, *_WITHOUT_EFFECT)
    return missing + [name for name, value in given.items() if name not in known and value is not False]


class _Output(torch.autograd.Function):
    """The output of a call of the decoder."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, seam: Seam, call: DecoderCall, rows: Sequence[int], output: Tensor) -> Tensor:
        ctx.seam, ctx.call, ctx.rows = seam, call, rows
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.seam.take_gradient(ctx.call, ctx.rows, gradients[0])
        return None, None, None, None, None


class _OutsideOfSteps(torch.autograd.Function):
    """The output of a call outside of a training step, which keeps nothing for a backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            ".backward() of a loss outside of a training step, where the cut model keeps no activations: compute the "
            "loss in compute_loss, or run trainer.training_step(model, inputs), which leaves gradients"
        )
