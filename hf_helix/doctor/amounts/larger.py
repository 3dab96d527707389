"""Amounts of larger micro-batches, from the amounts of a smaller one: a lower bound of their work, without counting.

In:   the amounts of a rank, and the factor by which a micro-batch grows in sequences.
Out:  amounts for bounds of seconds.
Must hold: no operator has more work than its count would say. Products, attention and collectives of tokens grow with
the sequences; bytes of kernels grow only in the passes of layers through tokens, since others may be of weights and of
their gradients, which stay as large.
"""

from dataclasses import replace

from hf_helix.doctor.amounts.records import OTHER, Amounts, Kernel, OperatorAmounts, Transfer, of_each
from hf_helix.planning.graph.operator import Operator, Part
from hf_helix.planning.window.layout import named_operators


def larger_amounts(amounts: Amounts, factor: float) -> Amounts:
    """Returns at most the work of micro-batches with `factor` times the sequences; their memory is not known."""
    ops = dict(named_operators(amounts.layout))
    operators = {
        name: _larger(counted, ops[name], factor, amounts.layout.graphs[name[0]].forward.repeats)
        for name, counted in amounts.operators.items()
    }
    return replace(amounts, operators=operators, handed_on=int(factor * amounts.handed_on))


def _larger(counted: OperatorAmounts, op: Operator, factor: float, is_layer: bool) -> OperatorAmounts:
    of_tokens = is_layer and op.part is not Part.W and not op.ahead
    kernels = of_each(lambda kernel: _more(kernel, factor, of_tokens), counted.kernels)
    transfers = [_longer(each, factor) for each in counted.transfers] if of_tokens else counted.transfers
    return replace(counted, kernels=kernels, transfers=tuple(transfers))


def _more(kernel: Kernel, factor: float, of_tokens: bool) -> Kernel:
    grows = of_tokens and kernel.sort == OTHER
    count = int(factor * kernel.bytes) if grows else kernel.bytes
    return replace(kernel, flops=factor * kernel.flops, bytes=count, exponentials=factor * kernel.exponentials)


def _longer(transfer: Transfer, factor: float) -> Transfer:
    return replace(transfer, bytes=int(factor * transfer.bytes))
