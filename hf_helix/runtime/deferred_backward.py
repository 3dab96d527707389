"""Deferred backward passes: the backward pass of a call of the decoder overlaps with the forward pass of the next call.

In:   a runner whose last unit ends at the decoder's output; the micro-batches of a call; the gradients of what the call
      returned.
Out:  the output of a call, and values of the graphs that it asks for; after `finish`, complete gradients in
      `parameter.grad`.
Must hold: a backward pass runs overlapped with the forward pass of the next call, by the plan, or in `finish`. Every
rank of a batch makes the same calls and gives gradients in the same order.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_helix.planning.plan.call_programs import CallPrograms, build_call_programs
from hf_helix.planning.schedule.placement import FOLD, FRONT
from hf_helix.planning.window.layout import Key
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.executor import no_sources
from hf_helix.runtime.gradients.reduce import GradientReducer
from hf_helix.runtime.microbatch import MicroBatch, MicroBatchState
from hf_helix.runtime.runner import Runner


@contextlib.contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Returns the context after which modules have the modes (train or eval) from before."""
    modes = {module: module.training for module in modules}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(eq=False)
class DecoderCall:
    """A call of the decoder.

    Attributes:
        pieces: its micro-batches.
        states: their state between the forward and the backward pass.
        modes: whether each module of the decoder was in training mode.
        gradients: of values that the call returned, a tensor for each piece; None before the caller's backward pass.
        is_done: whether the backward pass has run.
    """

    pieces: Sequence[MicroBatch]
    states: Sequence[MicroBatchState]
    modes: Sequence[bool]
    gradients: dict[Key, Sequence[Tensor]] | None = None
    is_done: bool = False


class DeferredBackward:
    """Runs a decoder call by call; see `hf_helix.engine.cut.called_decoder` for the order of the passes.

    Args:
        runner: the runner of the cut model, whose last unit gives the decoder's output.
        modules: the modules of the decoder, whose modes (train or eval) a backward pass shares with its forward pass.

    Attributes:
        num_fused: the number of forward passes that ran overlapped with a backward pass.
        output: the decoder's output, whole [sequence, rows, hidden].
        hidden: the output of the embedding and of every layer, of this rank's tokens [tokens, rows, hidden].
        routers: the logits of every router, of this rank's tokens [tokens * rows, experts].
    """

    def __init__(self, runner: Runner, modules: Sequence[nn.Module] = ()) -> None:
        self.runner = runner
        self.modules = modules
        self.num_fused = 0
        layout, head = runner.layout, runner.rank_units.head
        graphs = {unit: layout.graph(unit, True) for unit in range(head + 1) if not layout.transfers(unit)}
        whole = [unit for unit in graphs if not layout.units[unit].startswith(FRONT)]
        *self.hidden, self.output = [(unit, graphs[unit].outputs[0]) for unit in whole]
        self.routers: list[Key] = [(unit, value) for unit, graph in graphs.items() for value in graph.shown]
        self._programs: dict[tuple[int, tuple[Key, ...]], CallPrograms] = {}
        self._waiting: deque[DecoderCall] = deque()
        self._reduction: GradientReducer | None = None  # of a window that has begun

    def is_here(self, key: Key) -> bool:
        """Returns whether a value is one of this rank's units."""
        return self.runner.layout.rank_of(key[0]) == self.runner.rank_units.rank

    @plain_parameters()
    def forward(
        self, pieces: Sequence[MicroBatch], asked: tuple[Key, ...] = ()
    ) -> tuple[DecoderCall, dict[Key, list[Tensor]]]:
        """Runs the forward pass of a call, overlapped with the backward pass that has waited longest, if any.

        Args:
            pieces: the micro-batches of the call.
            asked: the values to return after the output, of `hidden` and `routers`.

        Returns:
            The call, and of every value on the rank with its unit the tensors of the pieces.
        """
        count, programs = len(pieces), self._programs_for(len(pieces), asked)
        modes = [module.training for module in self.modules]
        earlier = self._next(count, modes)
        states = dict(enumerate(earlier.states)) if earlier else {}
        if not states:
            self.runner.rank_units.mark_weights_stale()
        program = programs.both if earlier else programs.forward
        self.num_fused += earlier is not None and self.runner.scheduler.placement == FOLD
        batches = [*(earlier.pieces if earlier else pieces), *pieces]
        executor = self.runner.executor
        executor.run(
            program,
            batches,
            self.runner.absent_gradients,
            saves_for_backward=True,
            reduction=self._reducing() if earlier else None,
            states=states,
        )
        held, read = [states[count + place] for place in range(count)], programs.read_backward
        here = [key for key in (self.output, *asked) if self.is_here(key)]
        takes = {key: executor.peek if key in read else executor.take for key in here}
        values = {key: [take(state, key) for state in held] for key, take in takes.items()}
        return DecoderCall(pieces, held, modes), values

    def evaluate(self, pieces: Sequence[MicroBatch], asked: tuple[Key, ...] = ()) -> dict[Key, list[Tensor]]:
        """Runs a forward pass that no backward pass follows; returns the values as `forward` does. A caller's inference
        mode is of its thread only, and the threads of communication could not write to tensors made in it."""
        self.runner.rank_units.mark_weights_stale()
        with torch.inference_mode(False), torch.no_grad():
            found = self.runner.run_forward(pieces, (self.output, *asked))
        return {key: values for key, values in found.items() if self.is_here(key)}

    def backward(self, call: DecoderCall, gradients: Mapping[Key, Sequence[Tensor]]) -> None:
        """Takes gradients of values of this rank that a call returned, a tensor for each piece. The backward pass runs
        later.

        Raises:
            RuntimeError: the backward pass has run.
        """
        if call.is_done:
            raise RuntimeError(
                "a second .backward() through a call of the model, whose backward pass has run beside a later call: "
                "add the losses of a call up, and call .backward() once, or twice before the model is called again"
            )
        if call.gradients is None:
            call.gradients = {}
            self._waiting.append(call)
        for key, given in gradients.items():
            known = call.gradients.get(key)
            call.gradients[key] = [a + b for a, b in zip(known, given, strict=True)] if known else given

    @plain_parameters()
    def finish(self) -> None:
        """Runs the backward passes that wait, and reduces the gradients. Collective."""
        while len(self._waiting) > 1:
            self._run_backward(self._waiting.popleft())
        reduction = self._reducing()
        if self._waiting:
            reduction.last = len(self._waiting[0].pieces) - 1
            self._run_backward(self._waiting.popleft())
        self.runner.rank_units.mark_weights_stale()
        reduction.finish()
        self._reduction = None

    def drop(self) -> None:
        """Forgets the backward passes that wait, as after an error."""
        self._waiting.clear()
        self._reduction = None

    def _reducing(self) -> GradientReducer:
        """Returns the gradient reduction of the window, see `Runner.reduction`."""
        if self._reduction is None:
            self._reduction = self.runner.reduction()
        return self._reduction

    def _run_backward(self, call: DecoderCall) -> None:
        program = self._programs_for(len(call.pieces)).backward
        states = dict(enumerate(self._started(call).states))
        reduction = self._reducing()
        with modes_kept(self.modules):
            for module, mode in zip(self.modules, call.modes, strict=True):
                module.training = mode
            self.runner.executor.run(
                program, call.pieces, no_sources, saves_for_backward=True, reduction=reduction, states=states
            )

    def _next(self, count: int, modes: Sequence[bool]) -> DecoderCall | None:
        """Returns the call whose backward pass overlaps with a forward pass of `count` pieces in `modes`."""
        if not self._waiting:
            return None
        call = self._waiting.popleft()
        if len(call.pieces) == count and call.modes == modes:
            return self._started(call)
        self._run_backward(call)
        return None

    def _started(self, call: DecoderCall) -> DecoderCall:
        """Returns a call whose states have its gradients."""
        assert call.gradients is not None
        for key, pieces in call.gradients.items():
            for state, gradient in zip(call.states, pieces, strict=True):
                state.given[self._gradient_of(key)] = gradient
        call.gradients, call.is_done = None, True
        return call

    def _gradient_of(self, key: Key) -> Key:
        unit, value = key
        return self.runner.layout.key(unit, f"d.{value}", forward=False)

    def _programs_for(self, count: int, asked: tuple[Key, ...] = ()) -> CallPrograms:
        if (count, asked) not in self._programs:
            runner = self.runner
            forward = runner.forward_schedule(count)
            ahead = runner.executor.streams.slots_ahead
            placement = runner.scheduler.placement
            outputs = (self.output, *asked)
            self._programs[count, asked] = build_call_programs(
                runner.plan, forward, runner.layout, runner.rank_units.rank, outputs, placement, ahead
            )
        return self._programs[count, asked]
