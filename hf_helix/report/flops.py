"""Model FLOPs and what devices can do: for TFLOP/s and MFU in the logs.

In:   a model's configuration and parameters; a device's name.
Out:  floating-point operations per token, in both conventions; dense bf16 peaks.
Must hold: only work that the model asks for counts (no recomputation). `full` counts attention as if every token
attended to every other, as Megatron and the paper do; `causal` counts what causal attention needs, half of it.
"""

from typing import Any

from torch import nn

from hf_helix.models.graph.experts import is_experts
from hf_helix.models.stock.causal_lm import has_towers, layer_configs
from hf_helix.models.stock.four_bit import matrix_sizes
from hf_helix.planning.timing.token_flops import TokenFlops

# Dense bf16 TFLOP/s, from the vendors' data sheets, by whole words of the device's name.
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


CHOICES = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "moe_top_k")
"""Fields of configurations with the number of experts that a token meets, or with a number for each layer."""

WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")
"""What `config.layer_types` calls layers without attention."""


def token_flops(model: Any) -> TokenFlops:
    """Returns the work of a token in a decoder model, before the model is cut: 6 per weight that a token meets, 4 per
    frozen weight, and 12 per head dimension and position. A token meets some experts of a mixture, see `CHOICES`. The
    states of recurrent layers are not counted, since their work is small against their projections', nor is the
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
        share = _num_chosen(config) / len(weight) if weight in experts else 1.0
        linear += sizes[weight] * share * (6.0 if weight.requires_grad else 4.0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = zip(layer_configs(config), kinds, strict=True)
    widths = (_width(layer) for layer, kind in layers if kind not in WITHOUT_ATTENTION)
    return TokenFlops(linear, 12.0 * sum(widths))


def _num_chosen(config: Any) -> float:
    """Returns the number of experts that a token meets in a layer; the mean of layers that differ."""
    chosen = next((value for name in CHOICES if (value := getattr(config, name, None)) is not None), None)
    if chosen is None:
        raise ValueError(f"{type(config).__name__} has none of {', '.join(CHOICES)}, the number of experts of a token")
    return float(sum(chosen) / len(chosen)) if isinstance(chosen, list) else float(chosen)


def _width(config: Any) -> int:
    """Returns the dimensions of all query heads of a layer."""
    heads = getattr(config, "num_attention_heads", 1)
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def peak_tflops(device_name: str) -> float | None:
    """Returns the dense bf16 peak of a device in TFLOP/s, by its name; None if unknown."""
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
