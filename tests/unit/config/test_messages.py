"""What construction says: the nearest option, sizes that work for processes and heads, what may not be meant."""

import logging
from typing import Any

import pytest
import torch
from support.models import llama, tiny
from torch import nn

from hf_helix import HelixConfig
from hf_helix.engine.cut import checks
from hf_helix.engine.cut.checks import check_sizes, warn_bf16_weights


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (3, {"tp_size": 2}, ["tp_size=2 must divide the world size, 3 processes", "values that work: 1"]),
        (6, {"tp_size": 6}, ["4 attention heads and 2 key-value heads", "with 6 processes, tp_size=1 or 2)"]),
        (8, {"tp_size": 8, "pp_size": 1}, ["2 key-value heads", "with 8 processes, tp_size=1 or 2 or 4)"]),
        (4, {"tp_size": 2, "pp_size": 4}, ["pp_size=4 must divide", "values that work: 1, 2"]),
    ],
)
def test_sizes_that_work_count_heads_and_processes(
    world: int, sizes: dict[str, int], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "world_size", lambda: world)
    with pytest.raises(ValueError, match="must divide") as caught:
        check_sizes(llama(num_hidden_layers=1), HelixConfig(**sizes))
    for word in words:
        assert word in str(caught.value)
    assert "1, 3" not in str(caught.value)


def test_what_may_not_be_meant(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        warn_bf16_weights(model)
        assert not caplog.messages
        warn_bf16_weights(tiny(num_hidden_layers=1, dtype="bfloat16"))
        (said,) = caplog.messages
        assert "torch.bfloat16" in said
        assert "dtype=torch.float32" in said


def test_eager_attention_of_ones_own_over_shared_sequences() -> None:
    """Refused where it is declared; others have nothing special that a ring would leave out, or it is built."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward as with_sinks
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped

    from hf_helix.models.graph.attention import Attention, declare_attention
    from hf_helix.models.graph.builder import Builder
    from hf_helix.models.graph.context import ParallelContext
    from hf_helix.operators.communication.transport import Axis, SilentTransport

    def declared(implementation: str, **options: Any) -> None:
        attn = llama(num_hidden_layers=1, attn_implementation=implementation).model.layers[0].self_attn
        b = Builder("layer", "layers.0", ParallelContext(cp=Axis(SilentTransport(2, 0))))
        declare_attention(b, Attention(attn, lambda *_: _, **options), "q", "k", "v")

    def own(*given: Any, **options: Any) -> Any:
        return capped(*given, **options)

    sinks = {"s_aux": nn.Parameter(torch.zeros(2))}
    with pytest.raises(ValueError, match=r"cp_size=2.*attn_implementation='eager'.*\.own.*cp_size=1"):
        declared("eager", eager=own)
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa'.*eager_attention_forward, s_aux\) is not built"):
        declared("sdpa", eager=with_sinks, tensors=sinks)
    with pytest.raises(ValueError, match=r"LlamaAttention drops out 0\.1 .*attention_dropout=0\.0"):
        declared("sdpa", dropout=0.1)
    with pytest.raises(ValueError, match=r"eager_attention_forward, block_indices\) is not built"):
        declared("sdpa", options={"scaling": 1.0, "block_indices": 3})
    declared("sdpa", eager=own)
    declared("eager")
    declared("eager", eager=capped, options={"scaling": 1.0, "softcap": 2.0})
    declared("eager", eager=with_sinks, tensors=sinks)
