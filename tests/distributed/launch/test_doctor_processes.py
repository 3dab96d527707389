"""The doctor counts and ranks in several processes, and finds what one finds."""

import pytest
from support.simulated import case_of, cluster_with, on_meta

from hf_helix.doctor.layouts import Ranking, Search
from hf_helix.doctor.simulated import SimulatedModel

CLUSTER = cluster_with(devices_per_node=2, device={"peak_tflops": {"bf16": 0.05}}, node={"gb_per_s": 1})
LENGTH = 64


def search(workers: int, dtype: str = "bf16") -> Ranking:
    paper = SimulatedModel(on_meta(), CLUSTER)
    usual = case_of(length=LENGTH, dtype=dtype)
    return Search(paper.amounts, CLUSTER, 32 * LENGTH, usual, paper.layers, workers=workers).run()


@pytest.mark.slow
def test_several_processes_find_the_same() -> None:
    result = [search(workers) for workers in (1, 2)]
    assert result[0] == result[1]
    assert len(result[0].steps) > 1


def test_an_error_in_another_process_is_raised() -> None:
    with pytest.raises(ValueError, match=r"has no device\.peak_tflops for fp32"):
        search(2, dtype="fp32")
