"""How many kernels a decoder layer launches on a GPU, forward and backward, operator by operator.

Counted: the kernels that the doctor's meter sees on the meta device, where operators take the branches of a GPU. Views
and allocations do not count. What is left out: collectives; the executor's own sums, where several operators read one
value; copies of weights in the type of products, made once for all micro-batches of a window; and that a few calls
launch more than one kernel (a matrix product split along its inner dimension, a sum over rows of a tall matrix).

    python -m benchmarks.kernel_count
    python -m benchmarks.kernel_count --model qwen3 --tp_size 1 --precision fp32
"""

from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.common import options_of
from hf_helix.config import HelixConfig
from hf_helix.doctor.counting import amounts_of
from hf_helix.engine.synthetic import model_on_meta

PRECISIONS = {"bf16": torch.bfloat16, "fp32": None}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64}


def count_layer(config: Any, tp_size: int = 2, dtype: torch.dtype | None = torch.bfloat16) -> dict[str, int]:
    """Returns the kernels of a model's first decoder layer by operator, such as `F.attn.norm`.

    Args:
        config: of a Transformers causal language model.
        tp_size: the number of tensor-parallel ranks, of which one is counted.
        dtype: of matrix products under autocast; None for that of the weights.
    """
    amounts = amounts_of(model_on_meta(config), HelixConfig(tp_size=tp_size), 1, 16, dtype)
    layer = amounts.model.units[1]
    entries = amounts.layout.graphs[layer].entries()
    counts = {entry: len(amounts.operators[layer, entry].kernels) for entry, op in entries if not op.kind.communicates}
    return {entry: count for entry, count in counts.items() if count}


def main() -> None:
    parser = options_of(__doc__, model="llama", tp_size=2)
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    options = parser.parse_args()
    config = AutoConfig.for_model(options.model, **SIZES)
    counts = count_layer(config, options.tp_size, PRECISIONS[options.precision])
    print(f"kernels of a layer of {options.model}, tp_size={options.tp_size}, {options.precision}\n")
    for entry, count in counts.items():
        print(f"  {entry:<28} {count:>3}")
    forward = sum(count for entry, count in counts.items() if entry.startswith("F."))
    print(f"\n  {forward} forward and {sum(counts.values()) - forward} backward")


if __name__ == "__main__":
    main()
