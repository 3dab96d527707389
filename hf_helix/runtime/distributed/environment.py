"""Variables that CUDA reads once, at its start: set as early as possible, or checked.

In:   the environment, before CUDA has started; later, whether there is a pipeline.
Out:  the variables, and a sentence for the user if a variable came too late.
Must hold: the user's settings stay; nothing is imported, so that `import hf_helix` is quick.

`TrainingArguments` and `Accelerator` start CUDA before any call of ours, so the variables are set on import.
"""

import os
import sys

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Queues to the device. Streams that share a queue wait for each other; there are more streams than the default of
eight."""
NUM_CONNECTIONS = "32"

LOADING = "CUDA_MODULE_LOADING"
"""With `LAZY`, the default, the first launch of a kernel loads the kernel, and may wait until the device is idle. A
pipeline's receive keeps the device busy until another rank has sent, so two ranks could wait for each other. `EAGER`
loads all kernels at start, for seconds and up to a GB of device memory; so only pipelines set it."""


CTAS = "NCCL_MAX_CTAS"
"""The most thread blocks of a kernel of NCCL, for all groups."""


def cuda_has_started() -> bool:
    """Returns whether this process has a CUDA context already, so that variables come too late."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def set_connections() -> None:
    """Gives CUDA a queue for every stream, unless the user has chosen, or CUDA has started."""
    if not cuda_has_started():
        os.environ.setdefault(CONNECTIONS, NUM_CONNECTIONS)


def load_eagerly() -> None:
    """Makes CUDA load all kernels at its start, unless the user has chosen, or CUDA has started."""
    if not cuda_has_started():
        os.environ.setdefault(LOADING, "EAGER")


def check_environment(pp_size: int) -> list[str]:
    """Returns notes for the user about these variables once CUDA has started; empty if all is well."""
    if not cuda_has_started():
        return []
    notes = []
    if ctas := os.environ.get(CTAS):
        notes.append(f"{CTAS}={ctas} limits the kernels of every NCCL group, in place of hf_helix's limits by group")
    connections = os.environ.get(CONNECTIONS)
    if connections is None or connections == "1":
        state = "was not set when CUDA started" if connections is None else "is 1, which takes half of the overlap"
        notes.append(
            f"{CONNECTIONS} {state}; import hf_helix before CUDA is used, or set {CONNECTIONS}={NUM_CONNECTIONS} in "
            "the environment of the launcher"
        )
    if pp_size > 1 and os.environ.get(LOADING) != "EAGER":
        notes.append(
            f"{LOADING} was not EAGER when CUDA started, so that the first steps of a pipeline (pp_size={pp_size}) may "
            f"hang; set {LOADING}=EAGER in the environment of the launcher, or give pp_size before TrainingArguments "
            f"starts CUDA: in the launcher's YAML, or with TrainingArguments(parallelism_config=HelixPlugin(pp_size="
            f"{pp_size}), ...) instead of helix_config"
        )
    return notes
