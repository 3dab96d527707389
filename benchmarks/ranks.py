"""Ranks of a benchmark: processes of this machine, of two hosts that a slow link joins, or with a quota of the cores.

In:   what a rank does, how many ranks there are, and which host each is on.
Out:  the exit code of the command.
Must hold: ranks die with the process that started them, and hosts and quotas are gone when it ends.

Hosts are two network namespaces, joined by a veth pair whose speed `tc tbf` limits; quotas are control groups. Both
need root. A rank is the command once more, with `RANK` in its environment.
"""

import argparse
import contextlib
import ctypes
import datetime
import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import program

NAMESPACES = ("helix-a", "helix-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICES = ("helix-veth-a", "helix-veth-b")
MTU = "65535"  # large packets: a real network card does not take the cores' time, and a small packet would
BURST = "96kb"  # small, or single collectives look faster than the link is
LOCK = Path(tempfile.gettempdir()) / "hf_helix_ranks.lock"
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 2_000  # microseconds; short, or a rank would run at full speed for as long as an operator takes
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@dataclass(frozen=True)
class Ranks:
    """How a benchmark's ranks are started.

    Attributes:
        count: how many.
        hosts: the host of each rank, 0 or 1; None for this machine without namespaces.
        quotas: whether each rank has an equal share of the cores, by a control group.
        pins: whether each rank keeps to one core, that of its host.
        seconds: after which everything is stopped.
    """

    count: int = 2
    hosts: Sequence[int] | None = None
    quotas: bool = False
    pins: bool = True
    seconds: float = 3600

    def run(self, work: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> None:
        """Starts the ranks and ends with their exit code; as a rank, joins the group and does the work."""
        if "RANK" not in os.environ:
            sys.exit(self.start())
        import torch.distributed as dist

        options.rank = int(os.environ["RANK"])
        self.join(options.rank)
        work(options)
        dist.barrier()
        dist.destroy_process_group()

    def start(self, arguments: Sequence[str] = ()) -> int:
        """Runs this command as every rank and returns the exit code.

        Args:
            arguments: of the ranks, besides those of this command.
        """
        with self.running(arguments) as ranks:
            return wait_for(ranks, self.seconds)

    @contextlib.contextmanager
    def running(self, arguments: Sequence[str] = ()) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
        """Starts the ranks, and ends them at the end of the context. Arguments as in `start`."""
        if (self.hosts or self.quotas) and os.geteuid() != 0:
            sys.exit(f"hosts and quotas need root: sudo env PATH=$PATH python -m {program()}")
        for number in ENDINGS:
            signal.signal(number, _end)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            if self.hosts or self.quotas:
                stack.enter_context(_only_run())
            if self.hosts:
                stack.enter_context(_hosts())
            if self.quotas:
                stack.enter_context(_quotas(self.count))
            port = _free_port()
            ranks: list[subprocess.Popen[bytes]] = []
            try:
                for rank in range(self.count):
                    ranks.append(self._rank(rank, folder, port, arguments))
                yield ranks
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()

    def _rank(self, rank: int, folder: str, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        host = self.hosts[rank] if self.hosts else None
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HELIX_CACHE": folder,
            "TMPDIR": folder,  # all ranks have it in common
            "MASTER_ADDR": "127.0.0.1" if host is None else ADDRESSES[0],
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
        }
        command = [sys.executable, "-m", program(), *sys.argv[1:], *arguments]
        if host is not None:
            environment["GLOO_SOCKET_IFNAME"] = DEVICES[host]
            command = ["ip", "netns", "exec", NAMESPACES[host], *command]
        die_with_parent = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG

        def begin() -> None:
            die_with_parent()
            if self.quotas:
                (_group_of(rank) / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.Popen(command, env=environment, preexec_fn=begin)

    def join(self, rank: int) -> None:
        """What a rank does first: one thread, one core, the group of all."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        if self.pins and not self.quotas and len(cores) > 1:
            os.sched_setaffinity(0, {cores[(self.hosts[rank] if self.hosts else rank) % len(cores)]})
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))

    def is_first_of_host(self, rank: int) -> bool:
        """Returns whether no rank before is on the same host."""
        return self.hosts is not None and self.hosts.index(self.hosts[rank]) == rank


def shape(host: int, rate: int, device: str | None = None) -> None:
    """Sets the speed of a host's end of the link, or of another of its devices.

    Args:
        host: 0 or 1; called on a rank of it.
        rate: Mbit/s.
        device: None for the link.
    """
    shaper = ["tbf", "rate", f"{rate}mbit", "burst", BURST, "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", device or DEVICES[host], "root", *shaper], check=True)


def _end(number: int, frame: object) -> None:
    """Ends by way of every `finally`, once."""
    for other in ENDINGS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> int:
    """Waits until all are done, one has failed, or time is up; the exit code."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if any(codes) or None not in codes:
            return int(any(codes))
        time.sleep(0.2)
    print(f"stopped after {seconds} s", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _only_run() -> Iterator[None]:
    """Names and cores are those of one run."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("another run with hosts or quotas is under way")
        yield


@contextlib.contextmanager
def _hosts() -> Iterator[None]:
    """Two namespaces and the link between them."""
    _remove_hosts()
    try:
        _ip("link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1])
        for namespace, device, address in zip(NAMESPACES, DEVICES, ADDRESSES, strict=True):
            _ip("netns", "add", namespace)
            _ip("link", "set", device, "netns", namespace)
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", namespace, "link", "set", device, "mtu", MTU)
            _ip("-n", namespace, "link", "set", device, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
        yield
    finally:
        _remove_hosts()


def _remove_hosts() -> None:
    """A device goes with its namespace; where it never got there, by itself."""
    for namespace in NAMESPACES:
        subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["ip", "link", "del", DEVICES[0]], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def _quotas(count: int) -> Iterator[None]:
    """A control group for each rank, all with the same share of the machine."""
    share = len(os.sched_getaffinity(0)) / count
    groups = [_group_of(rank) for rank in range(count)]
    try:
        for group in groups:
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(min(1.0, share) * PERIOD)))
        yield
    finally:
        for group in groups:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.1)


def _group_of(rank: int) -> Path:
    return GROUPS / f"helix-{rank}"
