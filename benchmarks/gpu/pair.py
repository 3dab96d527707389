"""Two ranks on one machine, started without a launcher, so that nobody ends one when the other has failed.

On a machine with one GPU both use it. NCCL refuses two ranks on one device of one host, so each says that it is on a
host of its own (`NCCL_HOSTID`), and they talk through sockets over the loopback device. That is no way to be fast.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

OVER_LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


def environment_of(rank: int, port: int, dry: bool) -> dict[str, str]:
    """What a rank of two finds in its environment."""
    variables = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_DEBUG": "WARN",
    }
    if not dry and torch.cuda.device_count() < 2:
        variables |= {**OVER_LOOPBACK, "NCCL_HOSTID": f"helix-{rank}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return variables


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pair:
    """Two processes of one module, ended when the block is left.

    Args:
        module: run with `python -m`.
        given: its arguments.
        folder: takes the logs `<name>.<rank>.log`.
        name: of the logs.
        dry: on CPU.
    """

    def __init__(self, module: str, given: Sequence[str], folder: Path, name: str, dry: bool) -> None:
        port = free_port()
        self.logs = [folder / f"{name}.{rank}.log" for rank in range(2)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as file:
                command = [sys.executable, "-m", module, *given]
                environment = environment_of(rank, port, dry)
                self.processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def statuses(self) -> list[int | None]:
        """How each has ended; None for one that runs."""
        return [process.poll() for process in self.processes]

    def said(self, lines: int = 6) -> str:
        """The last lines of both logs."""
        tails = []
        for rank, log in enumerate(self.logs):
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            tails += [f"rank {rank}: {line}" for line in said[-lines:]]
        return "\n".join(tails)
