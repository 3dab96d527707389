"""Ranks that torchrun has started again do not read what those before them have left in the store."""

import importlib
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from hf_helix.runtime.failures.restarts import separate_starts

HANDLERS = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers


@pytest.mark.parametrize("start", ["0", "1", "2"])
@pytest.mark.parametrize("run", [None, "mine"])
def test_every_start_has_names_of_its_own(start: str, run: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the agents of torchrun use the store as well, which then is one for all starts."""
    kept = HashStore()
    kept.set("address", "of a process that is gone")
    PrefixStore(run or "none", kept).set("torchelastic/role_info/0", "of the first agent")
    store, place = rendezvous(kept, start, run, monkeypatch)
    assert place == [1, 2]
    assert store.check(["address"]) == (start == "0")
    store.set("mine", start)
    result: Any = [kept.check([name]) for name in ("mine", f"hf_helix/start/{start}/mine")]
    assert result == [start == "0", start != "0"]


def test_a_store_of_one_start_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--rdzv-backend=c10d`, where hosts may count different numbers of restarts."""
    new = HashStore()
    store, _ = rendezvous(new, "2", None, monkeypatch)
    assert store is new


def rendezvous(store: Any, start: str, run: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """What a process finds that torchrun has started for the n-th time, with this store."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    monkeypatch.setitem(HANDLERS, "env", lambda url, **_: iter([(store, 1, 2)]))
    separate_starts()
    separate_starts()  # acts once
    result, *place = next(HANDLERS["env"]("env://"))
    return result, place
