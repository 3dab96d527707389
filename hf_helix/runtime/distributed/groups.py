"""Process groups: their backend, their creation, and their communicators.

In:   rows of ranks, and the device of tensors.
Out:  this rank's groups; a group over all ranks for data in the host's memory; the name of this host.
Must hold: every rank makes the same groups in the same order, and every NCCL communicator is made before the first
step. Making a communicator blocks the host until the other ranks make it, so two ranks with different orders would wait
for each other for ever.
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

# The most thread blocks that a group's NCCL kernels may take from concurrent computation (an H100 has 132 SMs). Groups
# without an entry have NCCL's default (up to 32): computation waits soonest for collectives of tensor parallelism and
# experts, so these get the full bandwidth.
MAX_CTAS = {
    "lane": 4,  # a receive holds its blocks until its peer sends, which may be long
    "gradients": 8,  # nothing waits for reductions before the end of a window, and they overlap with all of backward
}

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def backends() -> dict[str, str]:
    """Returns the backends of the launcher's group, by the type of device."""
    # Always in the form "cpu:gloo,cuda:nccl", also where the launcher gave a single name, or none.
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
    """Returns a group over all ranks for data in the host's memory; None for the launcher's group, where it serves or
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

    Sends go out singly, without a gloo group: where `init_process_group` was given a `device_id`, ranks outside of a
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


def make_groups(places: torch.Tensor, backend: str | None = None, use: str = "") -> list[dist.ProcessGroup]:
    """Returns the groups over those rows of `places` that contain this rank; makes a group for each row. Collective.

    A rank outside a row spends about 0.1 ms on its group (where `init_process_group` was given a `device_id`, it must
    even take part in making the communicator), so all ranks make all groups, in one order.

    Args:
        backend: None for the backend of the launcher's group.
    """
    groups = []
    for row in places.reshape(-1, places.shape[-1]).tolist():
        group = dist.new_group(row, backend=backend, pg_options=options_of(use) if backend is None else None)
        if dist.get_rank() in row:
            groups.append(group)
    return groups


def group_of(places: torch.Tensor, backend: str | None = None, use: str = "") -> dist.ProcessGroup:
    """Returns the group over this rank's row, where every rank is in a row. See `make_groups`."""
    (group,) = make_groups(places, backend, use)
    return group


def options_of(use: str) -> Any:
    """Returns the options of a group for a use: limits of NCCL, new on each call; None for none."""
    if use not in MAX_CTAS or NCCL not in backends().values():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CTAS[use]
    return options


def wait_for_gloo(limit: float) -> None:
    """Waits until gloo's threads have released all tensors, at most `limit` seconds; call it before the interpreter
    ends.

    The threads release a tensor after its collective, and take the GIL for that, which aborts a process with an ending
    interpreter (pytorch/pytorch#190489). Torch joins the threads only where nothing holds the group, as a trainer does.
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


def order_launches(pp_size: int) -> None:
    """Lets kernels of several communicators start in the order of issue; call it before the first communicator.

    Without a pipeline, the order is the same on every rank. Otherwise two ranks could each fill their SMs with a kernel
    that waits for the other's. The ranks of a pipeline run different programs: a late receive could hold back the
    kernel that its sender waits for. NCCL reads the variable once, so the first layout of a process decides for later
    ones, unless the user has set the variable, or `share_process` knows all layouts.

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
    """Prepares this process for several layouts in turn, before the first mesh; earlier choices stay.

    If any layout has a pipeline, no kernels start in the order of issue. A layout without a pipeline then runs like
    tensor parallelism within a pipeline: without a hang while the kernels of its communicators fit on the GPU together.
    They do on a GPU with more SMs than NCCL takes blocks: 32 for a communicator at most, fewer for few bytes.
    """
    if backend_of(device) == NCCL and torch.version.hip is None and max(pp_sizes, default=1) > 1:
        os.environ.setdefault(LAUNCH_ORDER, "0")


def host_name() -> str:
    """Returns a name that tells hosts apart, as NCCL does: containers on different machines may have the same host
    name."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.environ.get("NCCL_HOSTID") or f"{platform.node()} {boot}"
