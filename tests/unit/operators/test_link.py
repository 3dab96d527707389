"""The emulated link: when transfers end, on a clock that the tests wind, and how many bytes go over it."""

import pytest
import torch

from hf_helix import HelixConfig
from hf_helix.config import parse_link
from hf_helix.operators.communication.emulated_link import EmulatedLink, LinkedTransport
from hf_helix.operators.communication.transport import Recorder, SilentTransport
from hf_helix.runtime.distributed.mesh import mesh_of

MEGABYTE = 10**6  # takes 8 ms at 1 Gbit/s


class Clock:
    """Seconds that pass only while somebody sleeps, or when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    @property
    def passed(self) -> float:
        return round(self.now - 100.0, 9)


def a_link(speed: str = "1gbit") -> tuple[EmulatedLink, Clock]:
    clock = Clock()
    return EmulatedLink(parse_link(speed), clock.read, clock.sleep), clock


def test_transfers_take_what_the_link_needs():
    link, clock = a_link("1gbit,2ms")
    link.carry(MEGABYTE, MEGABYTE, lambda: clock.sleep(0.003))
    assert clock.passed == 0.010  # latency and 8 ms
    link.carry(MEGABYTE, MEGABYTE, lambda: clock.sleep(0.050))
    assert clock.passed == 0.060
    # The direction with more bytes counts and an early wake is no early end.
    link, clock = a_link()
    link._sleep = lambda seconds: clock.sleep(seconds / 2 + 1e-6)  # type: ignore[method-assign]
    link.carry(MEGABYTE // 8, MEGABYTE, lambda: None)
    assert 0.008 <= clock.passed < 0.0081
    # Between two ranks the sender is busy and the receiver holds back.
    link, clock = a_link("1gbit,2ms")
    link.send(MEGABYTE, lambda: clock.sleep(0.001))
    assert clock.passed == 0.010
    link.receive(MEGABYTE, lambda: clock.sleep(0.005))  # the other rank was late
    assert clock.passed == 0.025
    assert (link.out.bytes, link.into.bytes) == (MEGABYTE, MEGABYTE)


def test_transfers_queue_in_one_direction_and_directions_do_not_wait_for_each_other():
    link, clock = a_link()
    start = clock.now
    # Reserved at the same moment, as by two streams of a rank.
    first = link.out.reserve(MEGABYTE, link.seconds(MEGABYTE), clock.now)
    second = link.out.reserve(MEGABYTE, link.seconds(MEGABYTE), clock.now)
    other_way = link.into.reserve(MEGABYTE, link.seconds(MEGABYTE), clock.now)
    assert [round(end - start, 9) for end in (first, second, other_way)] == [0.008, 0.016, 0.008]
    clock.now += 1.0  # an idle link saves nothing up
    assert round(link.out.reserve(MEGABYTE, 0.008, clock.now) - clock.now, 9) == 0.008
    assert (link.out.bytes, link.into.bytes) == (3 * MEGABYTE, MEGABYTE)


def test_nothing_waits_for_no_bytes_or_before_the_rate_is_known():
    link, clock = a_link("1gbit,5ms")
    link.carry(0, 0, lambda: None)
    even, clock_of_even = a_link("even")
    even.carry(MEGABYTE, MEGABYTE, lambda: None)
    assert (clock.passed, clock_of_even.passed, even.out.bytes) == (0, 0, MEGABYTE)
    even.rate = 412e6
    assert str(even) == "412 Mbit/s (even)"
    assert even.speed_now.text == "412mbit"


def test_the_link_counts_the_bytes_that_a_recorder_counts():
    link, _ = a_link("10gbit")
    recorder = Recorder(SilentTransport(4, 1))
    transport = LinkedTransport(recorder, link)
    value = torch.zeros(8, 3)
    transport.all_gather(torch.zeros(32, 3), value)
    transport.exchange(torch.zeros(8, 3), value)
    transport.reduce_scatter(torch.zeros(2, 3), value)
    transport.shift(torch.zeros(8, 3), value)
    transport.shift_back(torch.zeros(8, 3), value)
    transport.exchange_rows(torch.zeros(8, 3), value, [4, 1, 2, 1], [1, 2, 3, 2])
    transport.start_sum(value)()
    shard = value.nbytes // 4
    assert recorder.bytes_sent == link.out.bytes == 3 * 4 * shard + 2 * (2 * 3 * shard) + 2 * 4 * shard + 6 * 12
    assert link.into.bytes == link.out.bytes + 12  # one more row comes than goes
    assert [move.name for move in recorder.moved][-1] == "exchange_rows"


@pytest.mark.parametrize(
    ("text", "rate", "latency", "said"),
    [
        ("300mbit", 300e6, 0.0, "300 Mbit/s"),
        ("2.5gbit, 50us", 2.5e9, 50e-6, "2.5 Gbit/s, 50 us"),
        ("25Gbps", 25e9, 0.0, "25 Gbit/s"),
        ("25GbE,50us", 25e9, 50e-6, "25 Gbit/s, 50 us"),
        ("25G", 25e9, 0.0, "25 Gbit/s"),
        ("100 kbit,1ms", 100e3, 1e-3, "100 kbit/s, 1 ms"),
        ("Even", None, 0.0, "even"),
        ("even,0.2ms", None, 0.2e-3, "even, 200 us"),
    ],
)
def test_speeds_are_read_and_said(text: str, rate: float | None, latency: float, said: str):
    speed = parse_link(text)
    assert (speed.rate, speed.latency, str(speed)) == (rate, latency, said)
    assert parse_link(speed.text) == speed
    assert HelixConfig(link=text).link == text


@pytest.mark.parametrize("text", ["", "fast", "300", "0mbit", "300mbit,", "300mbit,1", "-1gbit", "300mb", "1ms"])
def test_what_is_no_speed_is_an_error_with_one_that_is(text: str):
    with pytest.raises(ValueError, match=r"link='.*' is no speed of a link; give a rate .*such as '300mbit'"):
        HelixConfig(link=text)


def test_other_types_and_places_without_a_link_are_refused():
    with pytest.raises(TypeError, match=r"link must be a speed as a string, such as '300mbit'.*got 300"):
        HelixConfig(link=300)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"link='even' emulates a link between processes.*--num_processes 2"):
        mesh_of(HelixConfig(link="even"), "cpu")
    with pytest.raises(ValueError, match=r"link='even' emulates a link for runs on CPU.*use link=None"):
        mesh_of(HelixConfig(link="even"), "cuda")
