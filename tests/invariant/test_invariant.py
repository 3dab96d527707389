"""Every case of the table equals its unsplit model, and one random valid order gives the bits of `sequential`."""

from pathlib import Path
from typing import Any

import pytest
from invariant.classes import CASES, Case, layouts_by_class, parameters
from invariant.harness import check
from support.models import own_models
from support.parity import unsplit
from support.pipeline_jobs import batches_of, reference

from hf_helix.cli.models import SUPPORTED


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


def test_the_layouts_of_the_supported_classes_are_those_that_tests_compare() -> None:
    """`hf-helix models` tells what the registry holds and what the table compares, no more and no less."""
    tested = layouts_by_class()
    tested["MistralForCausalLM"].discard("cp4")  # only in the slow tests of its windows
    assert {name: set(model.layouts) for name, model in SUPPORTED.items()} == tested
    assert all(len(set(model.layouts)) == len(model.layouts) for model in SUPPORTED.values())
    assert own_models() == ["GPT2LMHeadModel", "LlamaForCausalLM", "PhimoeForCausalLM"]
    assert set(own_models()) <= set(SUPPORTED)
