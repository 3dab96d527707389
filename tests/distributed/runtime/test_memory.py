"""Two strands keep at most the activations of one strand and of one more layer, in counted bytes.

On one stage, that is all. Of pipelines it is memory parity (paper, section 6.5): the fold against one strand of 1F1B.

1F1B's first rank holds P micro-batches of its layers, a rank of the fold as many of both its chunks. Each strand also
has a layer at work, with gradients and transfers on the way, so the second strand may take one layer and as much of
these as 1F1B has. The first rank of the fold also has the head, which on the linear placement is on the last one:
there, logits and their gradient come on top, a fifth of a layer here.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from support.marks import slow
from support.models import VOCABULARY
from support.pipeline_jobs import runner_of, trainer_of, window_of

from hf_helix.measure.memory import peak_bytes
from hf_helix.runtime.divided import plain_parameters

LAYERS, LENGTH = 8, 128
HEAD = 2 * LENGTH * VOCABULARY * 4
FEW, MANY = 6, 12  # micro-batches
TWO_STRANDS = [("folded_1f1b", plan) for plan in ("sequential", "round_robin", "dhelix", "greedy")]


@plain_parameters()
def peak_bytes_of(
    folder: str, helix: dict[str, Any], model: dict[str, Any], cases: Sequence[tuple[str, str, int]], length: int
) -> list[int]:
    """The most bytes of activations and buffers on this rank, in a window of each case."""
    trainer = trainer_of(folder, helix, model)
    result = []
    for rule, schedule, count in cases:
        window = window_of(trainer, count, rows=1, lengths=(length,))
        result.append(peak_bytes(runner_of(trainer, rule, schedule), window))
    trainer.helix.runner.executor.streams.close()
    return result


@pytest.fixture(scope="module")
def peaks(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The most bytes of activations and buffers of either rank."""
    folder = str(tmp_path_factory.mktemp("memory"))

    @functools.cache
    def of(schedule: str, plan: str, layers: int = LAYERS, count: int = FEW, axis: str = "pp") -> list[int]:
        helix = {f"{axis}_size": 2, "schedule": schedule}
        model = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 176}
        job = {"helix": helix, "model": model, "cases": [(plan, schedule, count)], "length": LENGTH}
        return [rank[0] for rank in cluster_of(2).run(peak_bytes_of, folder=folder, **job)]

    return of


@pytest.fixture(scope="module")
def one_strand(peaks: Any) -> int:
    return peaks("1f1b", "sequential")[0]


@pytest.fixture(scope="module")
def layer(peaks: Any, one_strand: int) -> float:
    """Bytes that a micro-batch leaves in a layer: four layers more are two more on each rank, for two micro-batches."""
    return (peaks("1f1b", "sequential", LAYERS + 4)[0] - one_strand) / 4


@pytest.fixture(scope="module")
def at_work(one_strand: int, layer: float) -> float:
    """What a strand has besides: gradients of the layer that runs backward, and what is on its way between ranks."""
    result = one_strand - LAYERS * layer
    assert 0 < result < layer / 2
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "plan"), TWO_STRANDS)
def test_two_strands_keep_one_layer_more_than_one(
    schedule: str, plan: str, peaks: Any, one_strand: int, layer: float, at_work: float
) -> None:
    first, second = peaks(schedule, plan)
    assert max(first - HEAD, second) <= one_strand + layer + at_work


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sequential", "greedy"])
def test_dualpipe_v_keeps_half_a_stage_more(
    plan: str, peaks: Any, one_strand: int, layer: float, at_work: float
) -> None:
    half = LAYERS / 2 / 2
    first, second = peaks("dualpipe_v", plan)
    assert max(first - HEAD, second) <= one_strand + (half + 1) * layer + at_work


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "plan"), [*TWO_STRANDS, ("dualpipe_v", "greedy"), ("1f1b", "sequential")])
def test_the_number_of_microbatches_does_not_enter(schedule: str, plan: str, peaks: Any, layer: float) -> None:
    few, many = peaks(schedule, plan), peaks(schedule, plan, count=MANY)
    assert all(abs(a - b) <= layer for a, b in zip(few, many, strict=True)), f"{few} {many}, a layer is {layer}"


@pytest.mark.parametrize("plan", ["greedy", *(slow(plan) for plan in ("round_robin", "dhelix"))])
@pytest.mark.parametrize("layers", [5, slow(4)])
def test_two_strands_on_one_stage(plan: str, layers: int, peaks: Any) -> None:
    def most(plan: str, layers: int) -> int:
        return max(peaks("folded_1f1b", plan, layers, 3, "tp"))

    layer = (most("sequential", 5) - most("sequential", 3)) / 2
    assert layer > 0.05 * most("sequential", 5)
    assert most(plan, layers) <= most("sequential", layers) + layer
