"""What the watch asks of the store does not grow with the number of ranks, and still every rank hears who has died."""

import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from hf_helix.runtime.failures import bounded_store, heartbeat
from hf_helix.runtime.failures.bounded_store import BoundedStore
from hf_helix.runtime.failures.heartbeat import Watch

ROUNDS = 3


class Counted:
    """A connection to a store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.requests += 1
            return getattr(self.store, name)(*arguments)

        return ask


@pytest.fixture
def server() -> HashStore:
    """A store within this process, which makes no connections."""
    return HashStore()


def watches(server: Any, world: int) -> list[Watch]:
    """One for each rank, none of them in a thread; they wait for each other when they are made."""
    made: dict[int, Watch] = {}

    def make(rank: int) -> None:
        made[rank] = Watch(rank, world, Counted(server.clone()))  # type: ignore[arg-type]

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(world)]


def requests(watch: Watch) -> int:
    return watch._store.requests  # type: ignore[attr-defined]


@pytest.mark.parametrize(("world", "over_tcp"), [(2, True), (8, True), (64, False)])
def test_two_requests_a_rank_and_round(world: int, over_tcp: bool, server: HashStore) -> None:
    tcp = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if over_tcp else None
    ranks = watches(tcp or server, world)
    before = [requests(watch) for watch in ranks]
    for _ in range(ROUNDS):
        assert [watch._round() for watch in ranks] == [""] * world
    assert [requests(watch) - count for watch, count in zip(ranks, before, strict=True)] == [2 * ROUNDS] * world


@pytest.mark.parametrize(("world", "seconds"), [(2, 0.5), (128, 0.5), (256, 1.0), (1024, 4.0), (4096, 4.0)])
def test_many_ranks_send_signs_of_life_more_rarely(world: int, seconds: float) -> None:
    assert heartbeat.interval_of(world) == seconds < heartbeat.GRACE


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is dead when it was silent between two looks."""
    monkeypatch.setattr(heartbeat, "DEAD_AFTER", 0.0)


@pytest.mark.parametrize("dead", [0, 2])
def test_all_hear_of_a_rank_that_falls_silent(dead: int, server: HashStore, impatient: None, capfd: Any) -> None:
    ranks = watches(server, 4)
    alive = [watch for watch in ranks if watch.rank != dead]
    assert [watch._round() for watch in ranks] == [""] * 4
    heard = [watch._round() for watch in alive] + [watch._round() for watch in alive]
    (said,) = set(heard[3:])
    assert said.startswith(f"rank {dead} died: no sign of life for 0 s (last seen on ")
    assert f"ends because rank {dead} died" in capfd.readouterr().err


def test_a_rank_that_has_left_is_not_missed(server: HashStore, impatient: None) -> None:
    ranks = watches(server, 3)
    for watch in ranks:
        watch._round()
    ranks[1]._thread.start()
    ranks[1].close()
    for _ in range(2):
        ranks[0]._beat()
        ranks[2]._beat()
        assert (ranks[0]._round(), ranks[2]._round()) == ("", "")


@pytest.mark.parametrize("kind", [TypeError, dist.DistNetworkError])
def test_a_fault_of_the_watch_is_no_dead_rank(
    kind: type[Exception], server: HashStore, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on, the trace is shown, and nobody misses the rank; a lost store in a step ends the process."""
    ends, shown = list[str](), list[Any]()
    monkeypatch.setattr(heartbeat, "GRACE", 0.0)
    monkeypatch.setattr(Watch, "_end", lambda watch, failure: (ends.append(failure), watch._stop.set()))
    monkeypatch.setattr(threading, "excepthook", lambda raised: shown.append(raised.exc_type))
    ranks = watches(server, 2)
    monkeypatch.setattr(ranks[1], "_round", mock.Mock(side_effect=kind("odd")))
    with ranks[1].step():
        ranks[1].start()
        ranks[1]._thread.join()
    is_fault = kind is TypeError
    assert shown == [kind] * is_fault
    assert ends == ["rank 0 died or has ended: its store is gone"] * (not is_fault)
    ranks[0]._round()
    assert ranks[0]._round() == "" if is_fault else "rank 1 died: no sign of life for 0 s"


def test_what_a_rank_says_of_its_end_is_heard_by_all_before_it_ends(server: HashStore, capfd: Any) -> None:
    ranks = watches(server, 3)
    listening = [threading.Timer(0.3, watch._round) for watch in ranks[:2]]
    for timer in listening:
        timer.start()
    assert ranks[2].report("rank 2 failed: boom") == "rank 2 failed: boom"
    assert all(watch._failure == "rank 2 failed: boom" for watch in ranks[:2])
    assert ranks[0].report("rank 0 failed: later") == "rank 2 failed: boom"
    assert "rank 1 ends because rank 2 failed: boom" in capfd.readouterr().err


def test_an_interrupted_rank_whose_store_is_gone_has_heard_of_another(server: HashStore, capfd: Any) -> None:
    """It has said that it ends because of rank 0, and says nothing of its own."""
    ranks = watches(server, 2)
    server.compare_set(heartbeat.FAILED, "", "rank 0 was interrupted")
    ranks[1]._round()
    ranks[1]._store = mock.Mock(**{"compare_set.side_effect": dist.DistNetworkError("gone")})
    assert ranks[1].report("rank 1 was interrupted") == "rank 0 was interrupted"


class SilentStore:
    """A store whose host is stopped."""

    def __init__(self) -> None:
        self.requests, self.goes_on = 0, threading.Event()

    def ask(self, *_: Any) -> list[bytes]:
        self.requests += 1
        self.goes_on.wait(20)
        return []

    set = multi_get = compare_set = ask


def test_a_silent_store_ends_a_rank_that_communicates(
    server: HashStore, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not communicate goes on, and so does its watch."""
    ends = list[str]()
    monkeypatch.setattr(Watch, "_end", lambda watch, failure: (ends.append(failure), watch._stop.set()))
    monkeypatch.setattr(bounded_store, "TURN", 0.02)
    ranks, silent = watches(server, 2), SilentStore()
    ranks[1].interval, ranks[1]._store = 0.01, BoundedStore(silent, 0.04)  # type: ignore[arg-type]
    ranks[1].start()
    time.sleep(0.3)
    assert ends == []
    assert silent.requests > 1
    with ranks[1].step():
        assert "has not answered" in str(ranks[1].find_culprit())
        ranks[1]._thread.join(5)
    assert ends == [heartbeat.SILENT]
    silent.goes_on.set()


def test_nothing_is_asked_of_a_host_that_is_gone() -> None:
    """torch would print twenty C++ frames."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = BoundedStore(server.clone(), 30)
    store.set("key", "value")
    assert store.multi_get(["key"]) == [b"value"]
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        store._line = socket.create_connection(listening.getsockname())
        store._line.setblocking(False)
        accepted, _ = listening.accept()
        store.set("key", "value")
        accepted.close()
    store.store = None  # type: ignore[assignment]
    with pytest.raises(dist.DistNetworkError, match="is gone"):
        store.set("key", "value")


def test_whose_fault_an_error_of_communication_is(server: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank asks all others, not rank 0 alone."""
    ranks = watches(server, 3)
    for watch in ranks:
        watch.interval = 0.02
    going = threading.Event()

    def beat() -> None:
        while not going.wait(0.005):
            ranks[0]._beat()

    thread = threading.Thread(target=beat)
    thread.start()
    assert str(ranks[1].find_culprit()).startswith("rank 2 died: no sign of life for 0 s (last seen on ")
    going.set()
    thread.join()


class Ended(Exception):
    pass


def test_the_last_word_does_not_go_into_a_replaced_stderr(monkeypatch, capfd) -> None:
    """torch.distributed's exception hook replaces sys.stderr while it formats a traceback."""

    def end(status: int) -> None:
        raise Ended

    watch = Watch.__new__(Watch)
    watch.rank = 0
    watch._stop = threading.Event()
    monkeypatch.setattr(heartbeat, "GRACE", 0.01)
    monkeypatch.setattr(os, "_exit", end)
    seen = sys.stderr
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(Ended):
        watch._end("rank 1 failed: RuntimeError: broken")
    monkeypatch.setattr(sys, "stderr", seen)
    assert "rank 0 ends because rank 1 failed: RuntimeError: broken" in capfd.readouterr().err
