"""A profile of a tiny Llama by hand, as `hf-helix profile` writes it, and ways to break its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.graphs import LLAMA, layout_of

from hf_helix.planning.timing.profile import Pair, Profile
from hf_helix.planning.window.layout import Name, named_operators

MODEL = "LlamaForCausalLM"
ABOUT = {"device": "by hand", "model": f"{MODEL} 0123456789ab", "mesh": "tp=2", "shapes": "1 x 16"}
UP, GATHER = ("layer", "F.mlp.up"), ("layer", "F.mlp.gather")


def tiny_profile(**changes: Any) -> Profile:
    """Two layers; collectives take 3 ms, computations 2 ms, everything gets 1.2 times slower beside another."""
    layout = layout_of(LLAMA, 2)
    kinds = {name: op.kind for name, op in named_operators(layout)}
    times: dict[Name, float] = {name: 3e-3 if kind.communicates else 2e-3 for name, kind in kinds.items()}
    options = {
        "times": times,
        "spread": dict.fromkeys(times, 0.05),
        "pairs": {(UP, GATHER): Pair(3.4e-3, 2.4e-3, 3.4e-3)},
        "like": {("layer", "F.attn.gather"): GATHER},
        **changes,
    }
    return Profile(ABOUT, layout, **options)


def broken(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The file with something changed in it."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path
