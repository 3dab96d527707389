"""The rules by the names that `HelixConfig(plan=...)` takes."""

from __future__ import annotations

from hf_helix.planning.baselines import round_robin, sequential
from hf_helix.planning.greedy import greedy
from hf_helix.planning.plan import Rule
from hf_helix.planning.search import search

RULES: dict[str, Rule] = {
    "sequential": sequential,
    "round_robin": round_robin,
    "greedy": greedy,
    "search": search,
}
