"""The error of predictions, said for the kind of a case."""

from support.simulated import case_of

from hf_helix.doctor.exactness import DATA, FLOAT8, LONG_ROWS, MIXTURE, TENSOR, error_line, kind_of, published_runs
from hf_helix.planning.timing.cluster import load_cluster


def test_the_first_screen_says_the_error_of_published_runs_of_a_kind() -> None:
    case = case_of(8, 1, 4096, tp=2, dp=4)
    count = sum(run.kind == TENSOR for run in published_runs())
    line = error_line(case, load_cluster("a100x8"))
    assert line.startswith(f"Predictions of published runs of this kind ({TENSOR}): ")
    assert line.endswith(f" too fast, {count} rows (docs/doctor.md).")
    assert "none on NVIDIA L40S" in error_line(case, load_cluster("l40sx8"))


def test_a_kind_with_few_runs_says_the_error_of_all() -> None:
    assert " of this kind (pipelines): " in error_line(case_of(8, 1, 4096, pp=8), load_cluster("h100x8"))


def test_kinds() -> None:
    assert kind_of(case_of(8, 1, 4096, tp=2), experts=8) == MIXTURE
    assert kind_of(case_of(8, 1, 4096, tp=2, float8="rowwise")) == FLOAT8
    assert kind_of(case_of(8, 1, 32768, tp=2)) == LONG_ROWS
    assert kind_of(case_of(8, 1, 4096, dp=8)) == DATA
