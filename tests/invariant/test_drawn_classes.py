"""The census finds what is equal, what is refused and what fails: a sample of it, and classes drawn at random."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.marks import slow

from benchmarks.census import LAYOUTS, subject_of, take
from hf_helix.models.stock.census import FAILED, PROVEN, REFUSED, read_census
from hf_helix.testing import prove_layouts

LIMIT = 600.0
SAMPLE = {
    "Gemma2ForCausalLM": ["pp2", "cp2"],
    "GptOssForCausalLM": ["cp2"],
    "MixtralForCausalLM": ["ep2"],
    "RobertaForCausalLM": ["tp2"],
    "BloomForCausalLM": ["tp2"],
    "XGLMForCausalLM": ["tp2", "pp2"],
    "GlmMoeDsaForCausalLM": ["tp2", "pp2", "ep2"],
}
"""With tensor parallelism, Gemma 2 is proven by `test_training_equals_the_stock_trainer`, before it trains."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layouts"), SAMPLE.items(), ids=list(SAMPLE))
def test_a_sample_is_proven(name: str, layouts: list[str]) -> None:
    found = take(name, layouts, LIMIT)
    assert [found[layout].status for layout in layouts] == [PROVEN] * len(layouts), found


@pytest.mark.parametrize(
    ("name", "layouts", "status", "said", "limit"),
    [
        ("MusicgenForCausalLM", ["tp2"], REFUSED, "does not train on token ids alone", LIMIT),
        ("LlamaForCausalLM", ["tp2"], FAILED, "have not answered", 0.001),  # it takes too long, and is ended
        slow("MiniMaxForCausalLM", ["tp2", "pp2", "cp2"], REFUSED, "", LIMIT),  # recurrent
    ],
)
def test_what_is_refused_or_fails_has_a_reason(
    name: str, layouts: list[str], status: str, said: str, limit: float
) -> None:
    for finding in take(name, layouts, limit).values():
        assert finding.status == status
        assert finding.reason
        assert "\n" not in finding.reason
        assert said in finding.reason


# Layouts that the census does not try; each is of axes that are proven alone.
WIDER: dict[str, dict[str, int]] = {"tp2+pp2": {"tp_size": 2, "pp_size": 2}, "tp4": {"tp_size": 4}}


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A class and a layout whose axes the census has proven for it."""
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
    """The census itself is taken again by `python -m benchmarks.census`."""
    name, layout = case
    (proof,) = prove_layouts(subject_of(name), [layout], timeout=300)
    census: Any = layout in LAYOUTS.values()
    assert proof.ok or (proof.refusal and not census), f"{name}: {proof}"
