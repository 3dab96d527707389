"""Which layouts the tests compare with the unsplit model or the stock Trainer, read from the tests themselves."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

from support.models import FAMILIES

from hf_helix.cli.models import layout_name

SOURCES: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("test_parity", "test_training_equals_the_stock_trainer", {}),
    ("test_parity", "test_data_parallel_ranks_share_the_batch", {}),
    ("test_gradients", "test_gradients_equal_the_unsplit_models", {}),
    ("test_dense_families", "test_two_ranks", {}),
    ("test_dense_families", "test_every_layout", {}),
    ("test_gpt_parity", "test_tensor_parallel", {"tp": 2}),
    ("test_gpt_parity", "test_two_ranks", {}),
    ("test_gpt_parity", "test_four_ranks", {}),
    ("test_gpt_parity", "test_every_layout", {}),
    ("test_gpt_parity", "test_every_layout_that_shares_sequences", {}),
    ("test_experts_parity", "test_two_ranks", {}),
    ("test_experts_parity", "test_four_ranks", {}),
    ("test_experts_parity", "test_every_layout", {}),
    ("test_pipeline_parity", "test_a_pipeline_equals_the_unsplit_model", {}),
    ("test_pipeline_parity", "test_every_layout_equals_the_unsplit_model", {}),
    ("test_context_parity", "test_two_ranks_share_a_sequence", {"cp": 2}),
    ("test_context_parity", "test_beside_other_dimensions", {}),
    ("test_context_parity", "test_every_layout", {}),
)
"""The tests that count: a module of tests/distributed, a function, and the sizes that its body fixes."""

ORDER = ("cp", "tp", "pp", "dp", "ep")  # of `sizes` in the tests


def layouts_in_tests() -> dict[str, set[str]]:
    """For every model class, its layouts, such as `tp2` or `cp2 dp2`; one process is left out."""
    found: dict[str, set[str]] = {}
    for name, function, fixed in SOURCES:
        module = importlib.import_module(name)
        for case in _cases(getattr(module, function)):
            layout = _layout({**fixed, **case})
            if layout:
                found.setdefault(_model_class(module, case), set()).add(layout)
    return found


def _cases(function: Any) -> Iterator[dict[str, Any]]:
    """The arguments that `pytest.mark.parametrize` gives a test, every combination."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [names] if isinstance(names, str) else list(names)
            axes.append([dict(zip(names, _values(value, len(names)), strict=True)) for value in values])
    for chosen in itertools.product(*axes):
        yield {name: value for part in chosen for name, value in part.items()}


def _values(value: Any, count: int) -> tuple[Any, ...]:
    if hasattr(value, "marks"):  # pytest.param
        return tuple(value.values)
    return (value,) if count == 1 else tuple(value)


def _model_class(module: Any, case: dict[str, Any]) -> str:
    family = case.get("family")
    if family is None:
        models = getattr(module, "MODELS", {})
        family = models.get(case.get("model"), {}).get("family", "llama")
    return FAMILIES[family].__annotations__["return"]


def _layout(case: dict[str, Any]) -> str:
    """The sizes above 1, in the order in which `hf-helix models` writes them."""
    sizes = dict(zip(ORDER, case["sizes"], strict=False)) if "sizes" in case else dict(case)
    if "tp_size" in case:
        sizes = {"tp": case["tp_size"], "dp": case["ranks"] // case["tp_size"]}
    return layout_name(sizes)
