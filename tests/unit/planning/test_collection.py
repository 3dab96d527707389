"""Functions that run while Python's collector of cyclic garbage is paused."""

import gc

import pytest

from hf_helix.planning.collection import without_collection


@without_collection
def is_enabled(fails: bool = False) -> bool:
    if fails:
        raise ValueError("no")
    return gc.isenabled()


def test_the_collector_is_paused_and_left_as_it_was() -> None:
    assert not is_enabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        is_enabled(fails=True)
    assert gc.isenabled()
    gc.disable()
    try:
        assert not is_enabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
