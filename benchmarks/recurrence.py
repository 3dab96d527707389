"""What the two ways of `cp_recurrence` cost a layer of Gated DeltaNet over a shared sequence: bytes, and CPU time.

Counted: the bytes that a rank sends in the forward of the layer, in fp32, without ranks: a transport notes what would
be sent. Measured: the CPU time of the recurrence on a rank, forward and backward, with what prepares and ends its
communication, over the code of Transformers; medians.

    python -m benchmarks.recurrence
    python -m benchmarks.recurrence --cp_size 4 --sequence 8192 --rounds 1
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from benchmarks.common import add_outputs, columns, options_of, save
from hf_helix.config import CP_RECURRENCES
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.operators.base import OperatorContext, explicit_gradients
from hf_helix.operators.communication.transport import Axis, Recorder, SilentTransport
from hf_helix.planning.graph.operator import Part

RULE = "torch_chunk_gated_delta_rule"


def main() -> None:
    parser = options_of(__doc__, cp_size=2, sequence=[512, 2048], heads=8, head_dim=128, hidden=256, rounds=5)
    add_outputs(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = model_of(options), []
    for length in options.sequence:
        for way in CP_RECURRENCES:
            taken = [measure(model, way, length, options.cp_size) for _ in range(options.rounds + 1)][1:]
            seconds = [1000 * statistics.median(column) for column in zip(*[times for times, _ in taken], strict=True)]
            sent = taken[0][1]
            rule = sum(count for name, count in sent.items() if RULE in name)
            rows.append(
                [str(length), way, f"{sum(sent.values()) - rule:,}", f"{rule:,}", *map("{:.0f}".format, seconds)]
            )
    header = ["tokens", "", "convolution, bytes", "recurrence, bytes", "forward ms", "backward ms"]
    table = columns(header, rows)
    print(table)
    save(options, "A recurrence over a shared sequence", __doc__, table, rows)


def model_of(options: argparse.Namespace) -> Any:
    """Returns a model with one recurrent layer, with half as many key heads as value heads."""
    sizes = {"hidden_size": options.hidden, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    heads = {"linear_num_key_heads": options.heads // 2, "linear_num_value_heads": options.heads}
    heads |= {"linear_key_head_dim": options.head_dim, "linear_value_head_dim": options.head_dim}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **heads, **layers, intermediate_size=64))


def measure(model: Any, way: str, length: int, cp_size: int) -> tuple[tuple[float, float], Mapping[str, int]]:
    """Returns the CPU seconds of the recurrence, forward and backward, and the bytes sent by each operator."""
    recorder = Recorder(SilentTransport(cp_size, 0))
    unit = family_of(model).units(model, ParallelContext(cp=Axis(recorder), cp_recurrence=way))[1]
    values: dict[str, Tensor] = {
        unit.graphs.forward.inputs[0]: torch.randn(length // cp_size, 1, model.config.hidden_size)
    }
    seconds, sent = [0.0, 0.0], {}
    for op in unit.graphs.forward.operators:
        ctx, operator, before = (
            OperatorContext({"length": length, "seen": None}, 0, True),
            unit.operators[op.name],
            recorder.bytes_sent,
        )
        with explicit_gradients():
            start = time.process_time()
            results = operator.method_of(Part.F)(ctx, *[values[name] for name in op.reads])
            middle = time.process_time()
            values.update(zip(op.writes, results, strict=True))
            if op.kind.communicates:
                sent[op.name] = recorder.bytes_sent - before
            elif RULE in op.name:
                operator.method_of(Part.B)(ctx, *map(torch.ones_like, results))
                seconds = [seconds[0] + middle - start, seconds[1] + time.process_time() - middle]
    return (seconds[0], seconds[1]), sent


if __name__ == "__main__":
    main()
