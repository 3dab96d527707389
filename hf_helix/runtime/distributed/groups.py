"""Process groups: the backend behind them, how they are made, and their communicators.

In:   rows of ranks, and the device that tensors lie on.
Out:  this rank's groups; one group over all ranks for what stays in the host's memory; the name of this host.
Must hold: every rank makes the same groups in the same order, and every NCCL communicator is made before the first
step: making one blocks the host until its other ranks do the same, so two ranks that came to two of them in different
order would wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

GLOO = "gloo"
NCCL = "nccl"

# The most thread blocks that a group's NCCL kernels may take from computation beside them (an H100 has 132 SMs). What
# is not listed has NCCL's default (up to 32): collectives of tensor parallelism and experts are waited for soonest, so
# they get the whole bandwidth.
MAX_CTAS = {
    "lane": 4,  # a receive holds its blocks from when it is posted until its peer sends, which may be long
    "gradients": 8,  # nothing waits for them before the end of a window, and they run beside backward all the time
}

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def backends() -> dict[str, str]:
    """By the type of device, the backend that carries its tensors in the launcher's group."""
    # Always in the form "cpu:gloo,cuda:nccl", also where the launcher gave one name, or none.
    return dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))


def backend_of(device: torch.device) -> str:
    """The backend that carries the tensors of a device.

    Raises:
        ValueError: there is none, or it is gloo for CUDA tensors, most of whose operations it lacks.
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
    """All ranks, for objects and tensors in the host's memory; None, which stands for the launcher's group, where that
    one carries them or there is none. Collective when it is first called.

    Objects that went over NCCL would be copied to the device and back, behind everything that it still computes.
    """
    if not dist.is_initialized() or "cpu" in backends():
        return None
    return _new_control_group(dist.group.WORLD)


@functools.cache
def _new_control_group(world: Any) -> dist.ProcessGroup:
    return group_of(torch.arange(dist.get_world_size()), GLOO)


def send_on_host(value: torch.Tensor, target: int) -> None:
    """Give a tensor to another rank over the host's memory, wherever it lies; empty ones are not sent."""
    if value.numel():
        dist.send(value.cpu().contiguous().view(-1).view(torch.uint8), target, group=control_group())


def receive_on_host(out: torch.Tensor, source: int) -> None:
    """The other end of `send_on_host`; `out` lies in the host's memory, in one piece."""
    if out.numel():
        dist.recv(out.view(-1).view(torch.uint8), source, group=control_group())


def broadcast_object(mine: T, source: int, ranks: Sequence[int]) -> T:
    """What one of several ranks brings, on all of them, over the host's memory. Collective over these ranks.

    One by one, so that no group of gloo is needed for them: where `device_id` was given to `init_process_group`,
    ranks outside of a new group take part in a split of NCCL's communicator that members of one of gloo do not join.

    Args:
        mine: what counts on the rank `source`.
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


def make_groups(places: torch.Tensor, backend: str | None = None, use: str = "") -> list[dist.ProcessGroup]:
    """A group over each row of `places`; those that this rank is in. Collective.

    Ranks outside a row only count it, in about 0.1 ms (where `device_id` was given to `init_process_group`, they must
    even take part in making its communicator), so all ranks make all groups, which keeps them in one order.

    Args:
        places: ranks in the launcher's group, in ascending order along the last dimension.
        backend: None for that of the launcher's group.
        use: a key of `MAX_CTAS`, or empty.
    """
    groups = []
    for row in places.reshape(-1, places.shape[-1]).tolist():
        group = dist.new_group(row, backend=backend, pg_options=options_of(use) if backend is None else None)
        if dist.get_rank() in row:
            groups.append(group)
    return groups


def group_of(places: torch.Tensor, backend: str | None = None, use: str = "") -> dist.ProcessGroup:
    """The group of this rank among the rows of `places`, where every rank is in one of them. See `make_groups`.

    Args:
        places: as of `make_groups`.
        backend: as of `make_groups`.
        use: as of `make_groups`.
    """
    (group,) = make_groups(places, backend, use)
    return group


def options_of(use: str) -> Any:
    """What a group for this use is made with: limits of NCCL, new on each call; None for none."""
    if use not in MAX_CTAS or NCCL not in backends().values():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CTAS[use]
    return options


def wait_for_gloo(limit: float) -> None:
    """Waits until gloo's threads have let go of what was communicated last; call it before the interpreter ends.

    They drop a tensor after its collective is over, and take the GIL to do so, which aborts a process whose interpreter
    is ending (pytorch/pytorch#190489). Torch joins them only where nobody holds the group, as a trainer does.

    Args:
        limit: seconds to wait at most.
    """
    deadline, now = time.monotonic() + limit, _gloo_threads()
    before: list[str] = []
    while (now != before or any("sleeping" not in each for each in now)) and time.monotonic() < deadline:
        time.sleep(0.01)  # without the GIL, and for longer than a thread waits between two attempts to get it
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[str]:
    """What gloo's worker threads do and how often they have slept, by the system; it stays the same while they rest."""
    found = []
    for task in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):
            text = task.read_text()
            if "pt_gloo_runloop" in text:
                found.append("".join(re.findall("^(?:State|voluntary).*", text, re.MULTILINE)))
    return found


def order_launches(pp_size: int) -> None:
    """Let kernels of several communicators start in the order of issue; call it before the first of them.

    Without a pipeline, that order is the same on every rank. Otherwise two ranks could each fill their SMs with a
    kernel that waits for the other's. The ranks of a pipeline run different programs: there, a receive that starts late
    could hold back what its sender waits for. NCCL reads the variable once, so the first layout of a process decides
    for those that follow, unless the user has set it, or `share_process` has been told of them all.

    Raises:
        ValueError: there is a pipeline, and kernels start in the order of issue.
    """
    if torch.version.hip is not None:  # RCCL 2.27 crashes with it
        return
    value = os.environ.setdefault(LAUNCH_ORDER, "0" if pp_size > 1 else "1")
    if pp_size > 1 and value != "0":
        raise ValueError(
            f"pp_size={pp_size} could hang in this process: {LAUNCH_ORDER} is {value!r}, with which NCCL starts "
            "kernels in the order of issue. hf_helix sets it for a layout without a pipeline, and NCCL reads it once "
            "in a process: train the pipeline in a process of its own, without that variable or with the value 0"
        )


def share_process(pp_sizes: Iterable[int], device: torch.device) -> None:
    """Prepare this process for several layouts in turn, before the first mesh; what was chosen before stays.

    If any of them has a pipeline, kernels of none start in the order of issue. A layout without a pipeline then runs as
    tensor parallelism does within one: without a hang as long as the kernels of its communicators find room side by
    side. They do on a GPU with more SMs than NCCL takes blocks: 32 for a communicator at most, fewer for few bytes.

    Args:
        pp_sizes: of the layouts.
        device: that tensors will lie on.
    """
    if backend_of(device) == NCCL and torch.version.hip is None and max(pp_sizes, default=1) > 1:
        os.environ.setdefault(LAUNCH_ORDER, "0")


def host_name() -> str:
    """Tells hosts apart, as NCCL does: containers on different machines may have the same name."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.environ.get("NCCL_HOSTID") or f"{platform.node()} {boot}"
