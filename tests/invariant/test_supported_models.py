"""`hf-helix models` tells what the registry holds and what the tests compare, no more and no less."""

from invariant.classes import layouts_by_class
from support.models import own_models

from hf_helix.cli.models import SUPPORTED


def test_every_declared_class_is_listed() -> None:
    assert own_models() == ["GPT2LMHeadModel", "LlamaForCausalLM", "PhimoeForCausalLM"]
    assert set(own_models()) <= set(SUPPORTED)


def test_the_layouts_are_those_that_tests_compare() -> None:
    tested = layouts_by_class()
    tested["MistralForCausalLM"].discard("cp4")  # only in the slow tests of its windows
    assert {name: set(model.layouts) for name, model in SUPPORTED.items()} == tested
    assert all(len(set(model.layouts)) == len(model.layouts) for model in SUPPORTED.values())
