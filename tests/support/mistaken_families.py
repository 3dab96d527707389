"""Families with a mistake, registered when this is imported under a name that no other test uses."""

from typing import Any

from transformers import LlamaForCausalLM

from hf_helix import register_model
from hf_helix.models.families.llama import Llama


class ForgetsASum(LlamaForCausalLM):
    """Llama, whose declaration is `WithoutSum`."""


class FailsOnARank(LlamaForCausalLM):
    """Llama; an operator of its declaration fails on rank 1, in the middle of a window."""


class WithoutSum(Llama):
    """Does not say that a norm works on a part of the sequence."""

    def attention(self, b: Any, layer: Any, x: str) -> str:
        h = b.all_gather("attn.gather", b.autograd("attn.norm", layer.input_layernorm, x))
        h = b.reduce_scatter("attn.scatter", self.self_attention(b, layer.self_attn, h))
        return b.add("attn.add", x, h)


class Forgetful(WithoutSum):
    model_class = "ForgetsASum"


class Failing(Llama):
    model_class = "FailsOnARank"

    def mlp(self, b: Any, layer: Any, x: str) -> str:
        def fail(h: Any) -> Any:
            if b.tp.rank == 1:
                raise RuntimeError("the operator fails here")
            return h.clone()

        return b.autograd("fails", fail, super().mlp(b, layer, x))


register_model(Forgetful())
register_model(Failing())
