"""Work of several commands: reading configurations and profiles, starting processes.

In:   names of files, profiles, the words of a command line.
Out:  paths, profiles, sizes and schedules; processes with a process group, each on its device.
Must hold: nothing here imports torch at module level; a command ends with the status of its processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from hf_helix.config import AUTO, nearest
from hf_helix.planning.graph.recompute import recompute_profile
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.schedule.slot_clock import stage_costs
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.profile_file import load_profile

if TYPE_CHECKING:
    import torch


def configuration_file(model: str) -> str:
    """A folder or file as it is; for a name on the Hub, the path of its config.json; else, and for a class or what
    looks like one, ValueError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    if Path(model).exists():
        return model
    if model.isidentifier():
        _refuse_class(model)
    try:
        return hf_hub_download(model, "config.json")
    except (HfHubHTTPError, ValueError, OSError) as error:
        folders = {str(file.parent) for file in Path(model).parent.glob("*/config.json")}
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"{model}: there is no such folder or file here{nearest(str(Path(model)), folders)}, and the Hub gave no "
            f"config.json of that name ({type(error).__name__}: {reason}). Give a folder that model.save_pretrained() "
            "wrote, its config.json, or, with a connection and without HF_HUB_OFFLINE=1, a name such as Qwen/Qwen3-0.6B"
        ) from error


def _refuse_class(name: str) -> None:
    from hf_helix.models.causal_lm import causal_lm_classes

    classes = causal_lm_classes()
    near = nearest(name, classes)
    if name in classes:
        raise ValueError(
            f"{name} is a class, which has no sizes; give a folder with a config.json, or a name on the Hub such as "
            "Qwen/Qwen3-8B"
        )
    if near or name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(
            f"{name} is no class of Transformers {version('transformers')}{near}; `hf-helix models` lists those "
            "that are known; a model of a class of your own is checked by hf_helix.testing.check_family(model)"
        )


def read_profile(file: Path, recompute: str | None) -> Profile:
    """The profile of a file, as if it had been measured with `recompute`."""

    profile = load_profile(file)
    if recompute is None:
        return profile
    if "recompute" in profile.about:
        raise ValueError(f"{file} was measured with recompute {profile.about['recompute']}; leave --recompute out")
    return recompute_profile(profile, recompute)


def made_for(profile: Profile) -> tuple[str, dict[str, int]]:
    """The model's class and the mesh, as plan files name them."""
    try:
        sizes = {"pp": "1", **dict(part.split("=") for part in profile.about["mesh"].split())}
        mesh = {f"{axis}_size": int(sizes[axis]) for axis in ("tp", "pp", "cp", "ep") if axis in ("tp", *sizes)}
        return profile.about["model"].split()[0], mesh
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"the profile does not say what it is for ({error}); measure anew with `hf-helix profile`"
        ) from error


def schedule_for(profile: Profile, microbatches: int, name: str = AUTO) -> Schedule:
    """The schedule of a window on the ranks of a profile.

    Args:
        profile: of a run, with the number of pipeline ranks.
        microbatches: of a window.
        name: of a schedule, as in `HelixConfig`.
    """

    return Scheduler(name, profile.layout.num_ranks, stage_costs(profile), spread=profile.layout.is_spread)(
        microbatches
    )


def start(words: Sequence[str], processes: int) -> None:
    """Runs a command of hf-helix, given by its words, in several processes of this host, by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    code = subprocess.call([*launcher, "-m", "hf_helix", *words], env={"OMP_NUM_THREADS": "1", **os.environ})
    if code:
        sys.exit(code)


def join(pp_size: int = 1) -> torch.device:
    """Joins the processes of a launcher and returns the device of this process: its GPU, or the CPU."""
    import torch
    import torch.distributed as dist

    from hf_helix.runtime.environment import check_environment, load_eagerly

    if pp_size > 1:
        load_eagerly()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        for notice in check_environment(pp_size):
            print(notice, file=sys.stderr)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device
