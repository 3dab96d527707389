"""The paper's models, on the meta device.

In:   a name of `published.MODELS`.
Out:  a Transformers model with weights in bf16.
Must hold: shapes are the paper's; where it says nothing, what Megatron-LM computes is taken: fused GELU, no dropout,
weights of embedding and head apart.
"""

from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.paper.published import MODELS, Shape
from hf_helix.engine.synthetic import model_on_meta

HEAD = 128
LONGEST = 131072
VOCABULARY = {"llama": 128256, "gpt2": 50304, "phimoe": 32064}


def build_model(name: str, layers: int | None = None) -> Any:
    """Returns a model of the paper.

    Args:
        name: a key of `MODELS`.
        layers: how many, if not the paper's.
    """
    shape = MODELS[name]
    count = shape.layers if layers is None else layers
    config = AutoConfig.for_model(shape.family, vocab_size=VOCABULARY[shape.family], **_sizes(shape, count))
    return model_on_meta(config, torch.bfloat16)


def _sizes(shape: Shape, layers: int) -> dict[str, Any]:
    heads = shape.hidden // HEAD
    if shape.family == "gpt2":
        return {
            "n_embd": shape.hidden,
            "n_inner": shape.inner,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": LONGEST,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": False,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }
    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.kv_heads or heads,
        "max_position_embeddings": LONGEST,
    }
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": 2, "sliding_window": None}
    return sizes | (experts if shape.experts else {})
