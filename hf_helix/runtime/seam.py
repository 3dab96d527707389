"""The cut decoder, called by code above it: forward passes, and backward passes that wait for the next call.

In:   a runner whose last unit ends at the decoder's output; the micro-batches of a call; the gradient of its output.
Out:  the output of a call on every rank; after `finish`, complete gradients in `parameter.grad`.
Must hold: a backward pass runs overlapped with the forward pass of the next call, by the plan, or in `finish`. Every
rank of a batch makes the same calls and gives gradients in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_helix.planning.window.layout import Key
from hf_helix.planning.window.program import Program
from hf_helix.planning.window.seam import Segments, build_segments
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.microbatch import MicroBatch, Strand
from hf_helix.runtime.runner import Runner


@dataclass(eq=False)
class DecoderCall:
    """A call of the decoder.

    Attributes:
        pieces: its micro-batches.
        strands: their state between the forward and the backward pass.
        gradients: of the output, a tensor for each piece; None before the caller's backward pass.
    """

    pieces: Sequence[MicroBatch]
    strands: Sequence[Strand]
    gradients: Sequence[Tensor] | None = None


class CalledDecoder:
    """Runs a decoder call by call.

    Args:
        runner: the runner of the cut model, whose last unit gives the decoder's output.

    Attributes:
        num_fused: the number of forward passes that ran overlapped with a backward pass.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_fused = 0
        head = runner.stage.head
        (output,) = runner.layout.graphs[runner.layout.units[head]].forward.outputs
        self._output: Key = (head, output)
        self._gradient: Key = (head, f"d.{output}")
        self._segments: dict[int, Segments] = {}
        self._forward_only: dict[int, Program] = {}
        self._waiting: deque[DecoderCall] = deque()

    @plain_parameters()
    def forward(self, pieces: Sequence[MicroBatch]) -> tuple[DecoderCall, list[Tensor]]:
        """Runs the forward pass of a call, overlapped with the backward pass that has waited longest, if any.

        Returns:
            The call, and on the rank with the last unit the output of every piece [sequence, rows, hidden].
        """
        count, segments = len(pieces), self._segments_for(len(pieces))
        earlier = self._next(count)
        strands = dict(enumerate(earlier.strands)) if earlier else {}
        if not strands:
            self.runner.stage.mark_weights_stale()
        program = segments.both if earlier else segments.forward
        self.num_fused += earlier is not None
        batches = [*(earlier.pieces if earlier else pieces), *pieces]
        self.runner.executor.run(program, batches, {}, training=True, strands=strands)
        held = [strands[count + place] for place in range(count)]
        call = DecoderCall(pieces, held)
        if self._output not in held[0].values:
            return call, []
        return call, [self.runner.executor.take(strand, self._output) for strand in held]

    @plain_parameters()
    def evaluate(self, pieces: Sequence[MicroBatch]) -> list[Tensor]:
        """Runs a forward pass that no backward pass follows; returns the outputs as `forward` does."""
        count, runner = len(pieces), self.runner
        if count not in self._forward_only:
            self._forward_only[count] = runner.build_program(runner.forward_schedule(count), (self._output,))
        runner.stage.mark_weights_stale()
        kept = runner.executor.run(self._forward_only[count], pieces, {}, training=False)
        return [values[self._output] for _, values in sorted(kept.items()) if self._output in values]

    def backward(self, call: DecoderCall, gradients: Sequence[Tensor]) -> None:
        """Takes the gradient of a call's output, a tensor for each piece; the backward pass runs later."""
        if call.gradients is not None:
            gradients = [one + other for one, other in zip(call.gradients, gradients, strict=True)]
        else:
            self._waiting.append(call)
        call.gradients = gradients

    @plain_parameters()
    def finish(self) -> None:
        """Runs the backward passes that wait, and reduces the gradients. Collective."""
        while len(self._waiting) > 1:
            self._run_backward(self._waiting.popleft())
        reduction, reduce_gradients = self.runner.reduction()
        if self._waiting:
            self._run_backward(self._waiting.popleft(), reduce_gradients)
        self.runner.stage.mark_weights_stale()
        reduction.finish()

    def drop(self) -> None:
        """Forgets the backward passes that wait, as after an error."""
        self._waiting.clear()

    def _run_backward(self, call: DecoderCall, reduce_gradients: Any = None) -> None:
        program = self._segments_for(len(call.pieces)).backward
        strands = dict(enumerate(self._started(call).strands))
        self.runner.executor.run(
            program, call.pieces, {}, training=True, reduce_gradients=reduce_gradients, strands=strands
        )

    def _next(self, count: int) -> DecoderCall | None:
        """Returns the call whose backward pass runs beside a forward pass of `count` pieces."""
        if not self._waiting:
            return None
        call = self._waiting.popleft()
        if len(call.pieces) == count:
            return self._started(call)
        self._run_backward(call)
        return None

    def _started(self, call: DecoderCall) -> DecoderCall:
        """Returns a call with the gradients of its output among its values."""
        assert call.gradients is not None
        for strand, gradient in zip(call.strands, call.gradients, strict=False):
            strand.values[self._gradient] = gradient
        call.gradients = None
        return call

    def _segments_for(self, count: int) -> Segments:
        if count not in self._segments:
            runner = self.runner
            forward = runner.forward_schedule(count)
            ahead = runner.executor.streams.slots_ahead
            placement = runner.scheduler.placement
            self._segments[count] = build_segments(
                runner.plan, forward, runner.layout, runner.stage.rank, self._output, placement, ahead
            )
        return self._segments[count]
