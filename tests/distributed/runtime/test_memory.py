"""Two strands keep at most the activations of one strand and of one more layer, in counted bytes.

On one stage, that is all. Of pipelines it is memory parity (paper, section 6.5): the fold against one strand of 1F1B.

1F1B's first rank holds P micro-batches of its layers, a rank of the fold as many of both its chunks. Each strand also
has a layer at work, with gradients and transfers on the way, so the second strand may take one layer and as much of
these as 1F1B has. The first rank of the fold also has the head, which on the linear placement is on the last one:
there, logits and their gradient come on top, a fifth of a layer here.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from support.models import VOCABULARY
from support.pipeline_jobs import runner_of, trainer_of, window_of

from hf_helix.measure.memory import peak_bytes
from hf_helix.runtime.divided import plain_parameters

LAYERS, LENGTH = 8, 128
HEAD = 2 * LENGTH * VOCABULARY * 4
FEW, MANY = 6, 12  # micro-batches


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

    def of(schedule: str, plan: str, layers: int = LAYERS, count: int = FEW, axis: str = "pp") -> list[int]:
        helix = {f"{axis}_size": 2, "schedule": schedule}
        model = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 176}
        job = {"helix": helix, "model": model, "cases": [(plan, schedule, count)], "length": LENGTH}
        return [rank[0] for rank in cluster_of(2).run(peak_bytes_of, folder=folder, **job)]

    return of


@pytest.mark.slow
def test_two_strands_of_a_pipeline(peaks: Any) -> None:
    """Under the fold, a layer and what a strand has at work more than 1F1B; under DualPipe-V half a stage more. The
    number of micro-batches does not enter."""
    one_strand = peaks("1f1b", "sequential")[0]
    # What a micro-batch leaves in a layer: four layers more are two more on each rank, for two micro-batches.
    layer = (peaks("1f1b", "sequential", LAYERS + 4)[0] - one_strand) / 4
    at_work = one_strand - LAYERS * layer
    assert 0 < at_work < layer / 2
    for schedule, plan, more in (
        *(("folded_1f1b", plan, 1) for plan in ("sequential", "dhelix", "greedy")),
        ("dualpipe_v", "greedy", LAYERS / 2 / 2 + 1),
    ):
        first, second = peaks(schedule, plan)
        assert max(first - HEAD, second) <= one_strand + more * layer + at_work
        many = peaks(schedule, plan, count=MANY)
        assert all(abs(a - b) <= layer for a, b in zip((first, second), many, strict=True))


def test_two_strands_on_one_stage(peaks: Any) -> None:
    few, one_strand, two_strands = (
        max(peaks("folded_1f1b", plan, layers, 3, "tp"))
        for plan, layers in (("sequential", 3), ("sequential", 5), ("greedy", 5))
    )
    layer = (one_strand - few) / 2
    assert layer > 0.05 * one_strand
    assert two_strands <= one_strand + layer
