"""The host of a process.

In:   the system.
Out:  the cores that a process may use.
Must hold: imports no torch, so that a question about a host is quick.
"""

import os


def usable_cores() -> int:
    """Returns the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
