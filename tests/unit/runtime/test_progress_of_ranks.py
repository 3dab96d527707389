"""Where a rank stands, and when a rank that lives is said to be stuck."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from hf_helix.planning.graph.operator import Kind
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.progress import LEAST_NOTICE, SOON, Progress, Standing
from hf_helix.runtime.streams.streams import CpuStreams

TIMEOUT = 100.0
WAITS = Standing(True, "7", "node-a", "a meeting")
LOOPS = Standing(False, "5", "node-b", "data loading (train.py:31)")


@pytest.fixture
def progress() -> Progress:
    return Progress(TIMEOUT, 0.5)


def test_a_stuck_rank_is_named_before_communication_fails(progress: Progress) -> None:
    said = {}
    for second in range(120):
        progress.note({0: WAITS, 1: LOOPS}, float(second))
        said[second] = progress.failure(float(second))
    first = next(second for second, text in said.items() if text)
    assert 0.8 * TIMEOUT <= first < TIMEOUT
    assert said[first] == "rank 1 (node-b) is in data loading (train.py:31), and the other ranks have waited for 95 s"


def test_a_notice_comes_once_and_early(progress: Progress) -> None:
    step, notices = 3.0, []
    for second in range(90):
        progress.note({0: WAITS, 1: LOOPS}, float(second))
        if text := progress.notice(float(second), step):
            notices.append((second, text))
    assert [second for second, _ in notices] == [SOON * step]
    assert notices[0][1].startswith("rank 1 (node-b) is in data loading (train.py:31), and the other ranks have waited")
    assert notices[0][1].endswith("the run ends in 65 s if nothing changes (ddp_timeout)")


def test_there_is_no_notice_before_a_step_was_measured(progress: Progress) -> None:
    for second in range(90):
        progress.note({0: WAITS, 1: LOOPS}, float(second))
        assert progress.notice(float(second), 0.0) == ""


@pytest.mark.parametrize(
    "standing",
    [
        lambda second: Standing(False, str(second), "node-b", "callbacks"),  # it goes on
        lambda second: Standing(True, "3", "node-b", "a meeting"),  # every rank waits
        lambda second: Standing(
            False, str(second // 60), "node-b", "evaluation"
        ),  # long, and not as long as the timeout
    ],
)
def test_a_rank_that_goes_on_never_fails(progress: Progress, standing: Callable[[int], Standing]) -> None:
    for second in range(500):
        progress.note({0: WAITS, 1: standing(second)}, float(second))
        assert progress.failure(float(second)) == ""


def test_ranks_that_wait_for_a_moment_only_do_not_end_the_run(progress: Progress) -> None:
    for second in range(500):
        waits = Standing(True, str(second // 40), "node-a", "a meeting")
        progress.note({0: waits, 1: LOOPS}, float(second))
        assert progress.failure(float(second)) == ""


def test_standings_travel_as_text() -> None:
    assert Standing.read(LOOPS.pack()) == LOOPS
    assert LEAST_NOTICE < TIMEOUT


# -- activities --------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen() -> Iterator[Callable[[], tuple[str, bool]]]:
    """Asks another thread where the main thread stands."""
    asks, answers = SimpleQueue[bool](), SimpleQueue[tuple[str, bool]]()

    def answer() -> None:
        while asks.get():
            time.sleep(0.2)  # the main thread is where it will be
            answers.put((activity.describe(), activity.is_waiting()))

    thread = threading.Thread(target=answer)
    thread.start()
    asks.put(True)
    yield answers.get
    asks.put(False)
    thread.join()


def test_a_line_of_the_users_code_is_named(seen: Callable[[], tuple[str, bool]]) -> None:
    with activity.doing(activity.DATA, lambda: "sample 3"):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
    text, waits = seen()
    assert text.startswith("data loading, sample 3 (test_progress_of_ranks.py:")
    assert not waits


def test_a_wait_for_a_transfer_is_told_from_a_computation(seen: Callable[[], tuple[str, bool]]) -> None:
    streams = CpuStreams()
    streams.wait(streams.issue(Kind.INTRA_NODE, lambda: time.sleep(0.5), (), "gather"))
    assert seen()[1]


def test_a_collective_of_the_users_code_is_no_wait_of_the_run(seen: Callable[[], tuple[str, bool]]) -> None:
    """It may have a timeout of its own, which is longer than that of the run."""
    options = {"store": dist.HashStore(), "rank": 0, "world_size": 2, "timeout": timedelta(seconds=0.5)}
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", **options)
    text, waits = seen()
    assert text.startswith("the script (test_progress_of_ranks.py:")
    assert not waits


def test_activities_count_their_time_and_end_with_errors() -> None:
    before, changes = activity.seconds[activity.DATA], activity.num_changes

    @activity.doing(activity.DATA)
    def fail() -> None:
        time.sleep(0.02)
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert activity.seconds[activity.DATA] - before >= 0.02
    assert activity.num_changes == changes + 2
    assert "data loading" not in activity.describe()


def test_activities_of_other_threads_do_not_count() -> None:
    changes = activity.num_changes

    def work() -> None:
        with activity.doing(activity.DATA):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert activity.num_changes == changes
