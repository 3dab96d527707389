"""Our runner does what the runtime of torch.distributed.pipelining does with the same action table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.schedules import every_size

from hf_helix.planning.pipeline.actions import Action, Slot
from hf_helix.planning.pipeline.named import one_f_one_b, w_schedule
from hf_helix.planning.pipeline.placement import stage_ranks
from hf_helix.planning.pipeline.schedule_file import PLACEMENT_OF


def check(cluster: Any, folder: Any, schedule: str, counts: tuple[int, ...], tied: bool) -> None:
    size = cluster.size
    window_sizes = sorted({1, size, size + 1, 2 * size + 1})
    job = {"size": size, "model": {"tie_word_embeddings": tied}, "counts": counts, "schedule": schedule}
    ranks = cluster.run("support.oracle_jobs:both", folder=str(folder), **job, window_sizes=window_sizes)
    placement = stage_ranks(PLACEMENT_OF[schedule], size)
    for place, count in enumerate(window_sizes):
        found = [rank[place] for rank in ranks]
        for rank, of in enumerate(found):
            assert of["ours"]["order"] == of["theirs"]["order"], f"rank {rank}, M={count}"
            assert len(of["ours"]["order"]) == 3 * count * placement.count(rank)
            np.testing.assert_allclose(of["ours"]["losses"], found[placement[-1]]["theirs"]["losses"], rtol=1e-6)
        ours = found[0]["ours"]["gradients"]
        theirs = {name: gradient for of in found for name, gradient in of["theirs"]["gradients"].items()}
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert np.linalg.norm(ours[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), f"{name}, M={count}"


@pytest.mark.parametrize(
    ("schedule", "tied"), [("w", False), ("w", True), ("dualpipe_v", False), ("dualpipe_v", True), ("1f1b", False)]
)
def test_two_ranks_run_as_torch_runs_them(schedule: str, tied: bool, cluster_of: Any, tmp_path: Any) -> None:
    counts = (2, 3) if schedule == "1f1b" else (2, 1, 1, 2)
    check(cluster_of(2), tmp_path, schedule, counts, tied)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(PLACEMENT_OF))
def test_four_ranks_run_as_torch_runs_them(schedule: str, cluster_of: Any, tmp_path: Any) -> None:
    counts = (1, 2, 1, 1) if schedule == "1f1b" else (1, 2, 1, 1, 1, 1, 1, 2)
    check(cluster_of(4), tmp_path, schedule, counts, tied=False)


@every_size
def test_w_is_1f1b_over_units(num_ranks: int, num_microbatches: int) -> None:
    """Unit k takes F of k down beside B of k-P on the other chunk, then both up: paper, section 4.1."""
    over_units = one_f_one_b(num_ranks, num_microbatches + num_ranks)
    for rank, slots in enumerate(w_schedule(num_ranks, num_microbatches)):
        expected = []
        for unit in (action for slot in over_units[rank] for action in slot.actions):
            ahead, behind = rank, 2 * num_ranks - 1 - rank
            if unit.direction == "B":
                ahead, behind = behind, ahead
            forward = Action(ahead, "F", unit.microbatch) if unit.microbatch < num_microbatches else None
            backward = Action(behind, "B", unit.microbatch - num_ranks) if unit.microbatch >= num_ranks else None
            expected += [Slot(forward, backward)] if forward or backward else []
        assert slots == expected
