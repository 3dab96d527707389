"""Pauses of the host that other ranks wait for."""

import gc
import os
import signal
import time

from hf_helix.runtime.stragglers.pauses import COLLECTION, LEAST, STOPPED, Pauses


def test_a_stopped_process_and_a_collection_are_told_apart() -> None:
    pauses = Pauses()
    pauses.start()
    time.sleep(0.2)
    pauses.take()
    child = os.fork()
    if child == 0:
        parent = os.getppid()
        os.kill(parent, signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2)
    stopped = pauses.take()
    assert 0.3 < stopped[STOPPED] < 5
    assert stopped[COLLECTION] < 0.1

    objects = [[] for _ in range(1_500_000)]
    pauses.take()
    begin = time.perf_counter()
    gc.collect()
    took = time.perf_counter() - begin
    time.sleep(0.2)
    collected = pauses.take()
    assert abs(collected[COLLECTION] - took) < 0.5 * took
    assert len(objects) > 0
    pauses.close()
    gc.collect()
    assert pauses.take()[COLLECTION] == 0


def test_short_delays_are_no_pauses() -> None:
    pauses = Pauses()
    pauses.start()
    time.sleep(0.3)
    assert pauses.take()[STOPPED] == 0 or pauses.take()[STOPPED] < 10 * LEAST
    pauses.close()
