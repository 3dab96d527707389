"""Random numbers that a model's own code draws in training, dropout apart, are refused by name."""

import pytest
import torch
from support.derived_models import small
from support.models import tiny
from torch import nn
from torch.nn import functional

from hf_helix.models.registry import family_of


def test_noise_of_a_router() -> None:
    """Evaluation would draw noise, too, and recomputation other noise than forward."""
    model = tiny("mixtral", num_hidden_layers=1, router_jitter_noise=0.1)
    with pytest.raises(ValueError, match=r"uniform in mlp draws random numbers.* router_jitter_noise=0\.0"):
        family_of(model)


def test_layers_that_are_left_out() -> None:
    model = small("OPTForCausalLM", num_hidden_layers=2, layerdrop=0.5).eval()  # as from_pretrained returns a model
    with pytest.raises(ValueError, match=r"layerdrop=0\.5 leaves out layers .*layerdrop=0\.0"):
        family_of(model)


class Attends(nn.Module):
    """Attention by torch, with dropout inside."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(1)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.rate).squeeze(1)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_inside_of_attention_of_torch(rate: float) -> None:
    model = tiny("mixtral", num_hidden_layers=1)
    layer = model.model.layers[0]
    layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, Attends(rate))
    if not rate:
        family_of(model)
        return
    with pytest.raises(ValueError, match=r"scaled_dot_product_attention in .* draws random numbers"):
        family_of(model)
