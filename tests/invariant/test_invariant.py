"""Every case of the table equals its unsplit model, and one random valid order gives the bits of `sequential`."""

from pathlib import Path
from typing import Any

import pytest
from invariant.classes import CASES, Case, parameters
from invariant.harness import check
from support.parity import unsplit
from support.pipeline_jobs import batches_of, reference


@pytest.mark.parametrize("case", parameters())
def test_equals_the_unsplit_model(case: Case, cluster_of: Any, tmp_path: Path) -> None:
    check(cluster_of, tmp_path, case)


def test_documents_in_a_row_stay_apart() -> None:
    """Packed rows mean something: the unsplit model gives other losses where position ids do not restart."""
    case = CASES["llama-tp2-packed"]
    single_batches = batches_of(case.count, case.rows, lengths=case.lengths, kind=case.kind)
    for batch in single_batches:
        del batch["position_ids"]
    packed = unsplit(case.model, case.count, case.kind, case.lengths, case.rows)
    assert packed["losses"] != reference(dict(case.model), single_batches)["losses"]
