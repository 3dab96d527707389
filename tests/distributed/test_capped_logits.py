"""`predict()` gives what the model's own forward gives, for a family that caps its logits under names of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.capped_jobs import CAP


def test_predict_gives_the_logits_of_the_model(cluster_of: Any, tmp_path: Path) -> None:
    """In processes of their own, where the family is registered."""
    job = {"job": "support.capped_jobs:predictions", "folder": str(tmp_path)}
    (wanted,) = cluster_of(1).run(**job, helix=None)
    assert 0.9 * CAP < np.abs(wanted["logits"]).max() <= CAP
    for found in [
        *cluster_of(1).run(**job, helix={}),
        *cluster_of(2).run(**job, helix={"tp_size": 2, "plan": "greedy"}),
    ]:
        np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found["logits"], wanted["logits"], rtol=0, atol=1e-5)
