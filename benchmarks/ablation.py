"""What a freedom of plans is worth, by prediction from a profile (the paper's figure 15).

    hf-helix profile --model FOLDER --tp_size 2 --output profile.json
    python benchmarks/ablation.py profile.json --without wgrad

Every rule makes its plan twice, with and without what is named: `intra_node` or `inter_node` (communication of that
kind is never overlapped), `comm_beside_comm` (both kinds share one stream), `wgrad` (weight gradients stay at their
canonical places).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper.ablate import ABLATIONS, ablate_profile
from hf_helix.cli.common import made_for, schedule_for
from hf_helix.config import RULES
from hf_helix.planning.plans.registry import make_plan, predict_plan
from hf_helix.planning.profile import Profile
from hf_helix.planning.profile_file import load_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, help="a file made with `hf-helix profile`")
    parser.add_argument("--without", nargs="+", choices=ABLATIONS, required=True, help="what plans must not use")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of the window")
    options = parser.parse_args()
    profile = load_profile(options.profile)
    print(f"| plan | predicted | without {', '.join(options.without)} |\n|---|---:|---:|")
    for rule in options.rules:
        free, ablated = (
            seconds(rule, each, options.microbatches) for each in (profile, ablate_profile(profile, options.without))
        )
        print(f"| `{rule}` | {free * 1e3:,.1f} ms | {ablated * 1e3:,.1f} ms |", flush=True)


def seconds(rule: str, profile: Profile, microbatches: int) -> float:
    """The predicted time of a window under the plan of a rule."""
    model, mesh = made_for(profile)
    schedule = schedule_for(profile, microbatches)
    plan = make_plan(rule, profile, model=model, mesh=mesh, schedule=schedule)
    return predict_plan(plan, profile, schedule)[1].seconds


if __name__ == "__main__":
    main()
