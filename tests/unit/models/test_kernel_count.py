"""How many kernels a layer launches: at most what is written here, so that nobody loses what somebody has saved.

A norm is one kernel; mistral and mixtral are derived.
"""

import pytest
from support.models import tiny

from benchmarks.kernel_count import count_layer

MOST = {
    # forward and backward of a layer with tp_size=2, products in bf16; of the declared families, and two derived ones
    "gpt2": (19, 41),
    "llama": (12, 23),
    "mistral": (12, 25),
    "mixtral": (59, 58),
    "phimoe": (100, 64),
}


@pytest.mark.parametrize("family", MOST)
def test_of_a_layer(family: str) -> None:
    counts = count_layer(tiny(family).config)
    forward = sum(count for entry, count in counts.items() if entry.startswith("F."))
    backward = sum(counts.values()) - forward
    assert 0 < forward <= MOST[family][0], counts
    assert 0 < backward <= MOST[family][1], counts
