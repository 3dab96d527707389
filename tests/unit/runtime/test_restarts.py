"""Ranks that torchrun has started again do not read what those before them have left in the store."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch.distributed import HashStore

from hf_helix.runtime.failures.restarts import separate_starts

HANDLERS = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers


@pytest.mark.parametrize("start", ["0", "1", "2"])
def test_every_start_has_names_of_its_own(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = HashStore()
    kept.set("address", "of a process that is gone")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
    monkeypatch.setitem(HANDLERS, "env", lambda url, **_: iter([(kept, 1, 2)]))
    separate_starts()
    separate_starts()
    store, *place = next(HANDLERS["env"]("env://"))
    assert place == [1, 2]
    assert store.check(["address"]) == (start == "0")
    store.set("mine", start)
    found: Any = [kept.check([name]) for name in ("mine", f"hf_helix/start/{start}/mine")]
    assert found == [start == "0", start != "0"]
