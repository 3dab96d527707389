"""How many kernels a layer launches: at most what is written here, so that nobody loses what somebody has saved."""

import pytest
from support.marks import slow
from support.models import tiny

from benchmarks.kernel_count import count_layer

MOST = {
    # forward and backward of a layer with tp_size=2, products in bf16
    "gpt2": (19, 41),
    "gpt_neox": (27, 59),
    "llama": (12, 23),
    "mistral": (12, 25),
    "mixtral": (59, 58),
    "phimoe": (100, 64),
    "qwen2": (12, 25),
    "qwen3": (18, 33),
    "qwen3_moe": (63, 59),
}


QUICK = ("gpt2", "llama", "phimoe", "mistral", "mixtral")  # the declared families, and two derived ones


@pytest.mark.parametrize("family", [slow(f, when=f not in QUICK) for f in MOST])
def test_of_a_layer(family: str) -> None:
    changes = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    counts = count_layer(tiny(family, **changes).config)
    forward = sum(count for entry, count in counts.items() if entry.startswith("F."))
    backward = sum(counts.values()) - forward
    assert 0 < forward <= MOST[family][0], counts
    assert 0 < backward <= MOST[family][1], counts
