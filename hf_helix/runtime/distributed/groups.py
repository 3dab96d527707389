"""Process groups: their backend, their creation, and their communicators.

In:   rows of ranks, and the device of tensors.
Out:  this rank's groups; a group over all ranks for data in the host's memory; the name of this host.
Must hold: every rank makes the same groups in the same order, and every NCCL communicator is made before the first
step. Making a communicator blocks the host until the other ranks make it, so two ranks with different orders would wait
for each other for ever.
"""

import contextlib
import functools
import math
import os
import platform
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _set_pg_timeout

from hf_helix.runtime.distributed.environment import CTAS

T = TypeVar("T")

GLOO = "gloo"
NCCL = "nccl"

COLLECTIVE, GRADIENTS, LANE = "collective", "gradients", "lane"

MAX_CTAS = {
    COLLECTIVE: 16,  # of tensor, context and expert parallelism, and gathers of weights: computation waits for them
    GRADIENTS: 8,  # nothing waits for reductions before the end of a window, and they overlap with all of backward
    LANE: 4,  # a receive holds its blocks until its peer sends, which may be long
}
"""The most thread blocks of an NCCL kernel, by the use of its group, on a GPU with SMs for `MAX_SHARE`; see
`max_ctas`."""

MAX_SHARE = 0.75
"""The most SMs that all concurrent NCCL kernels of a rank may take. The rest is for computation. NCCL launches clusters
of 4 blocks on Hopper and later, and a cluster needs 4 free SMs in one GPC (16 to 18 SMs): a free quarter has them."""

SHARED_STREAMS, MOST_LANES = 2, 8
"""Streams of a rank whose kernels run at the same time: of collectives (inside a node, between nodes), and lanes (two
directions to each of two neighbours, forward and backward); one more is for gradients."""

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def backends() -> dict[str, str]:
    """Returns the backends of the launcher's group, by the type of device."""
    # Always in the form "cpu:gloo,cuda:nccl", also if the launcher gave a single name, or none.
    return dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))


def backend_of(device: torch.device) -> str:
    """Returns the backend for the tensors of a device.

    Raises:
        ValueError: there is none, or it is gloo for CUDA tensors, most of whose operations gloo lacks.
    """
    by_device = backends()
    name = by_device.get(device.type)
    if name is not None and (name, device.type) != (GLOO, "cuda"):
        return name
    given = ", ".join(f"{backend} for {kind}" for kind, backend in by_device.items())
    needed = {
        "cuda": 'NCCL: init_process_group("cuda:nccl,cpu:gloo"), or train on CPU with TrainingArguments(use_cpu=True)',
        "cpu": 'gloo: init_process_group("gloo")',
    }
    raise ValueError(
        f"the process group was started with {given}, and the model is on {device.type}, which needs "
        f"{needed.get(device.type, 'a backend of its own')}. Accelerate chooses the right one when the script does not "
        "call init_process_group itself"
    )


def control_group() -> dist.ProcessGroup | None:
    """Returns a group over all ranks for data in the host's memory; None for the launcher's group, if it serves or
    there is no group. Collective at the first call.

    NCCL would copy objects to the device and back, after everything that the device still computes.
    """
    if not dist.is_initialized() or "cpu" in backends():
        return None
    return _new_control_group(dist.group.WORLD)


@functools.cache
def _new_control_group(world: Any) -> dist.ProcessGroup:
    return group_of(torch.arange(dist.get_world_size()), GLOO)


def send_on_host(value: torch.Tensor, target: int) -> None:
    """Sends a tensor on any device to another rank through the host's memory; an empty tensor is not sent."""
    if value.numel():
        dist.send(value.cpu().contiguous().view(-1).view(torch.uint8), target, group=control_group())


def receive_on_host(out: torch.Tensor, source: int) -> None:
    """Receives a tensor of `send_on_host`; `out` is contiguous in the host's memory."""
    if out.numel():
        dist.recv(out.view(-1).view(torch.uint8), source, group=control_group())


def broadcast_object(mine: T, source: int, ranks: Sequence[int]) -> T:
    """Returns the object of one of several ranks on all of them, through the host's memory. Collective over these
    ranks.

    Sends go out singly, without a gloo group: if `init_process_group` was given a `device_id`, ranks outside of a
    new group take part in a split of NCCL's communicator, and members of a gloo group do not join the split.

    Args:
        mine: the object, on the rank `source`.
        source, ranks: in the launcher's group.
    """
    if dist.get_rank() != source:
        received = [mine]
        dist.recv_object_list(received, source, group=control_group())
        return received[0]
    for other in ranks:
        if other != source:
            dist.send_object_list([mine], other, group=control_group())
    return mine


def make_groups(grid: torch.Tensor, backend: str | None = None, use: str = COLLECTIVE) -> list[dist.ProcessGroup]:
    """Returns the groups over those rows of `grid` that contain this rank; makes a group for each row. Collective.

    A rank outside a row spends about 0.1 ms on its group (if `init_process_group` was given a `device_id`, it must
    even take part in making the communicator), so all ranks make all groups, in one order.

    Args:
        backend: None for the backend of the launcher's group.
        use: of the groups, see `MAX_CTAS`.
    """
    groups = []
    for row in grid.reshape(-1, grid.shape[-1]).tolist():
        group = dist.new_group(row, backend=backend, pg_options=options_of(use) if backend is None else None)
        if dist.get_rank() in row:
            keep_timeout(group)
            groups.append(group)
    return groups


def timeout_of(group: Any) -> float:
    """Returns the seconds after which communication of a group fails: `ddp_timeout` of the launcher's group."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return default_pg_timeout.total_seconds()


def keep_timeout(group: dist.ProcessGroup) -> None:
    """Gives a group the timeout of the launcher's group; torch gives it half an hour."""
    _set_pg_timeout(timedelta(seconds=timeout_of(dist.group.WORLD)), group)


def set_timeout(seconds: float) -> None:
    """Sets the timeout of the launcher's group, for the groups that are made from now on as well."""
    if dist.is_initialized():
        _set_pg_timeout(timedelta(seconds=seconds))


def group_of(grid: torch.Tensor, backend: str | None = None, use: str = COLLECTIVE) -> dist.ProcessGroup:
    """Returns the group over this rank's row, if every rank is in a row. See `make_groups`."""
    (group,) = make_groups(grid, backend, use)
    return group


def options_of(use: str) -> Any:
    """Returns the options of a group for a use (see `MAX_CTAS`): limits of NCCL, new on each call; None without
    NCCL."""
    if NCCL not in backends().values():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas(use, multiprocessors())
    return options


def multiprocessors() -> int:
    """Returns the number of SMs of this process' GPU."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def max_ctas(use: str, sms: int) -> int:
    """Returns the most thread blocks of an NCCL kernel: so few that the kernels of all streams run at the same time.

    A kernel of NCCL holds its SMs until the same kernel runs on every rank of its group. So two ranks wait for ever if
    each has filled its SMs with a kernel that the other has no room for. Kernels of a stream run in turn, so a rank has
    at most a kernel for each stream, and all of them fit: whatever order the ranks choose, no kernel waits for room,
    and streams need no common order (`NCCL_LAUNCH_ORDER_IMPLICIT` would make a collective wait for all kernels issued
    before on any stream). A block takes an SM by itself; NCCL rounds sends up to a power of 2, so limits are powers.

    Args:
        use: of the group, see `MAX_CTAS`.
        sms: of the GPU; with few of them, all limits are halved until their sum fits.
    """
    most = SHARED_STREAMS * MAX_CTAS[COLLECTIVE] + MAX_CTAS[GRADIENTS] + MOST_LANES * MAX_CTAS[LANE]
    halvings = max(0, math.ceil(math.log2(most / (MAX_SHARE * sms))))
    return max(1, MAX_CTAS[use] >> halvings)


def check_launches(num_streams: int, has_pipeline: bool) -> None:
    """Checks the user's settings of NCCL before the first communicator.

    Args:
        num_streams: streams of communication that this rank may use at the same time.
        has_pipeline: whether ranks run different programs.

    Raises:
        ValueError: the layout could hang with the settings.
    """
    given = os.environ.get(CTAS, "")
    if given.isdecimal() and int(given) * num_streams > (sms := multiprocessors()):
        raise ValueError(
            f"{CTAS}={given} could hang: kernels of {num_streams} streams take {int(given) * num_streams} SMs of "
            f"{sms}, and a kernel without room on one rank holds up all others; unset {CTAS}, or give at most "
            f"{CTAS}={max(1, sms // num_streams)}"
        )
    if has_pipeline and os.environ.get(LAUNCH_ORDER, "0") != "0":
        raise ValueError(
            f"{LAUNCH_ORDER}={os.environ[LAUNCH_ORDER]} could hang with pp_size: NCCL then starts kernels in the order "
            f"of issue, and a late receive holds up the kernel that its sender waits for; unset it, or {LAUNCH_ORDER}=0"
        )


def wait_for_gloo(limit: float) -> None:
    """Waits until gloo's threads have released all tensors, at most `limit` seconds; call it before the interpreter
    ends.

    The threads release a tensor after its collective, and take the GIL for that, which aborts a process with an ending
    interpreter (pytorch/pytorch#190489). Torch joins the threads only if nothing holds the group, as a trainer does.
    """
    deadline, now = time.monotonic() + limit, _gloo_threads()
    before: list[str] = []
    while (now != before or any("sleeping" not in each for each in now)) and time.monotonic() < deadline:
        time.sleep(0.01)  # without the GIL, and for longer than a thread waits between two attempts to get it
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[str]:
    """Returns the states of gloo's worker threads and their counts of sleeps, by the system; constant while they
    rest."""
    found = []
    for task in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):
            text = task.read_text()
            if "pt_gloo_runloop" in text:
                found.append("".join(re.findall("^(?:State|voluntary).*", text, re.MULTILINE)))
    return found


def host_name() -> str:
    """Returns a name that identifies a host, as NCCL does: containers on different machines may have the same host
    name."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.environ.get("NCCL_HOSTID") or f"{platform.node()} {boot}"
