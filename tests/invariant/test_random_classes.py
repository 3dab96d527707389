"""Classes and layouts drawn at random from all that the census has proven: each is equal again, on other sizes too."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.census import LAYOUTS, subject_of
from hf_helix.models.census import PROVEN, read_census
from hf_helix.testing import prove_layouts

WIDER: dict[str, dict[str, int]] = {"tp2+pp2": {"tp_size": 2, "pp_size": 2}, "tp4": {"tp_size": 4}}
"""Layouts that the census does not try; each is of axes that are proven alone."""


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    census = read_census()
    layout = draw(st.sampled_from([*LAYOUTS, *WIDER]))
    alone = {name for name in LAYOUTS if name[:2] in layout}
    classes = sorted(
        name
        for name, findings in census.classes.items()
        if all(name_of in findings and findings[name_of].status == PROVEN for name_of in alone)
    )
    return draw(st.sampled_from(classes)), {**LAYOUTS, **WIDER}[layout]


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn())
def test_a_class_on_a_layout_is_equal_or_refused(case: tuple[str, dict[str, int]]) -> None:
    name, layout = case
    (proof,) = prove_layouts(subject_of(name), [layout], timeout=300)
    census: Any = layout in LAYOUTS.values()
    assert proof.ok or (proof.refusal and not census), f"{name}: {proof}"
