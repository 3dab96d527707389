"""Model FLOPs and what devices can do: for TFLOP/s and MFU in the logs.

In:   a model's configuration and parameters; a device's name.
Out:  floating-point operations per token, in both conventions; dense bf16 peaks.
Must hold: only work that the model asks for counts (no recomputation). `full` counts attention as if every token
attended to every other, as Megatron and the paper do; `causal` counts what causal attention needs, half of it.
"""

from typing import Any

from torch import nn

from hf_helix.models.causal_lm import has_towers
from hf_helix.models.four_bit import matrix_sizes
from hf_helix.models.graph.experts import is_experts
from hf_helix.planning.timing.token_flops import TokenFlops

# Dense bf16 TFLOP/s, from the vendors' data sheets, by what the device's name holds as whole words.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "V100": 125.0,
}


WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")
"""What `config.layer_types` calls layers without attention."""


def token_flops(model: Any) -> TokenFlops:
    """Returns the work of a token in a decoder model, before the model is cut: 6 per weight that a token meets, 4 per
    frozen weight, and 12 per head dimension and position. A token meets `num_experts_per_tok` experts of a mixture. The
    states of recurrent layers are not counted, since their work is small beside that of their projections, nor is the
    work of towers, which depends on the images of a batch."""
    config = model.config.get_text_config()
    experts = {weight for module in model.modules() if is_experts(module) for weight in module.parameters()}
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    kept = [module.original_module for module in model.modules() if hasattr(module, "original_module")]  # by PEFT
    unused = tables.union(*(module.parameters() for module in kept))
    sizes = matrix_sizes(model.get_decoder() if has_towers(model) else model)
    if (head := model.get_output_embeddings()) is not None:
        sizes |= matrix_sizes(head)
    weights = sizes.keys() - unused
    linear = 0.0
    for weight in weights | ({head.weight} if head is not None else set()):
        share = config.num_experts_per_tok / len(weight) if weight in experts else 1.0
        linear += sizes[weight] * share * (6.0 if weight.requires_grad else 4.0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(kinds)
    widths = (_width(layer) for layer, kind in zip(layers, kinds, strict=True) if kind not in WITHOUT_ATTENTION)
    return TokenFlops(linear, 12.0 * sum(widths))


def _width(config: Any) -> int:
    """Returns the dimensions of all query heads of a layer."""
    heads = getattr(config, "num_attention_heads", 1)
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def peak_tflops(device_name: str) -> float | None:
    """Returns the dense bf16 peak of a device in TFLOP/s, by its name; None where it is not known."""
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
