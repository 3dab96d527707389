"""What the commands read from files: configurations, profiles, what they were made for, schedules of their ranks.

In:   the options of a command line.
Out:  paths, profiles, sizes and schedules.
Must hold: nothing here imports torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_helix.config import AUTO

if TYPE_CHECKING:
    from hf_helix.planning.pipeline.actions import Schedule
    from hf_helix.planning.profile import Profile


def configuration_file(model: str) -> str:
    """A folder or file as it is; for a name on the Hub, the path of its config.json, fetched or cached.

    Raises:
        ValueError: neither is there.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    if Path(model).exists():
        return model
    try:
        return hf_hub_download(model, "config.json")
    except (HfHubHTTPError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"{model}: there is no such folder or file here, and the Hub gave no config.json of that name "
            f"({type(error).__name__}: {reason}). Give a folder that model.save_pretrained() wrote, its config.json, "
            "or, with a connection and without HF_HUB_OFFLINE=1, a name such as Qwen/Qwen3-0.6B"
        ) from error


def profile_of(options: argparse.Namespace) -> Profile:
    """The profile that is planned or drawn with."""
    from hf_helix.planning.graph.recompute import recompute_profile
    from hf_helix.planning.profile_file import load_profile

    profile = load_profile(options.profile)
    if options.recompute is not None:
        if "recompute" in profile.about:
            raise ValueError(
                f"{options.profile} was measured with recompute {profile.about['recompute']}; leave --recompute out"
            )
        profile = recompute_profile(profile, options.recompute)
    return profile


def made_for(profile: Profile) -> tuple[str, dict[str, int]]:
    """The model's class and the mesh, as plan files name them."""
    try:
        sizes = dict(part.split("=") for part in profile.about["mesh"].split())
        context_and_experts = {
            f"{name}_size": int(sizes.get(name, 1))
            for name in ("tp", "pp", "cp", "ep")
            if name in sizes or name == "pp"
        }
        return profile.about["model"].split()[0], {"tp_size": int(sizes["tp"]), **context_and_experts}
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"the profile does not say what it is for ({error}); measure anew with `hf-helix profile`"
        ) from error


def schedule_for(profile: Profile, microbatches: int, name: str = AUTO) -> Schedule:
    """The schedule of a window on the ranks that a profile is for.

    Args:
        profile: of a run; it says how many ranks the pipeline has.
        microbatches: of a window.
        name: of a schedule, as in `HelixConfig`.
    """
    from hf_helix.planning.pipeline.costs import stage_costs
    from hf_helix.planning.pipeline.scheduler import Scheduler

    return Scheduler(name, profile.layout.num_ranks, stage_costs(profile))(microbatches)
