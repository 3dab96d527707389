"""The census finds what is equal, what is refused and what fails; a sample of it."""

import pytest
from support.marks import slow

from benchmarks.census import take
from hf_helix.models.census import FAILED, PROVEN, REFUSED, read_census

LIMIT = 600.0


SAMPLE = {
    "Gemma2ForCausalLM": ["pp2", "cp2"],
    "GptOssForCausalLM": ["cp2"],
    "MixtralForCausalLM": ["ep2"],
    "RobertaForCausalLM": ["tp2"],
    "BloomForCausalLM": ["tp2"],
    "XGLMForCausalLM": ["tp2", "pp2"],
    "DeepseekV32ForCausalLM": ["tp2", "pp2", "ep2"],
    "GlmMoeDsaForCausalLM": ["tp2", "pp2", "ep2"],
}
"""With tensor parallelism, Gemma 2 is proven by `test_training_equals_the_stock_trainer`, before it trains."""
QUICK = "RobertaForCausalLM"


@pytest.mark.parametrize(
    ("name", "layouts"),
    [slow(*each, when=each[0] != QUICK, id=each[0]) for each in SAMPLE.items()],
)
def test_a_sample_is_proven(name: str, layouts: list[str]) -> None:
    found = take(name, layouts, LIMIT)
    assert [found[layout].status for layout in layouts] == [PROVEN] * len(layouts), found


@pytest.mark.slow
def test_a_recurrent_class_is_refused_with_a_reason() -> None:
    result = take("MiniMaxForCausalLM", ["tp2", "pp2", "cp2"], LIMIT)
    assert {finding.status for finding in result.values()} == {REFUSED}
    assert all("\n" not in finding.reason and finding.reason for finding in result.values())


def test_a_class_that_needs_more_than_token_ids_is_refused() -> None:
    result = take("MusicgenForCausalLM", ["tp2"], LIMIT)
    assert result["tp2"].status == REFUSED
    assert "does not train on token ids alone" in result["tp2"].reason


def test_a_layout_that_takes_too_long_is_ended_and_has_failed() -> None:
    result = take("LlamaForCausalLM", ["tp2"], 0.001)
    assert result["tp2"].status == FAILED
    assert "have not answered" in result["tp2"].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(read_census().classes))
def test_the_whole_census_is_found_again(name: str) -> None:
    census = read_census()
    if not census.is_current:
        pytest.skip("the census in the package is of other versions")
    findings = census.classes[name]
    again = take(name, list(findings), LIMIT)
    assert {layout: result.status for layout, result in again.items()} == {
        layout: result.status for layout, result in findings.items()
    }
