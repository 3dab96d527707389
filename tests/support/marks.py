"""Cases of a parametrized test that only `make test-slow` runs."""

from typing import Any

import pytest


def slow(*values: Any, when: bool = True, id: str | None = None) -> Any:
    """One case with these values, marked as slow; with `when=False` a case of the fast tests."""
    return pytest.param(*values, marks=[pytest.mark.slow] * when, id=id)
