"""The plans of `HelixConfig(plan=...)`: rules that make plans, by name, and plan files.

In:   a rule's name and a profile; or the path or the text of a file, and the model.
Out:  a plan.
Must hold: every rule makes its plan from the profile only, so no model is needed. The names are
`hf_helix.config.RULES`: options are checked without an import of planning. A damaged file, or a file of
another version or for another model, is an error with the remedy. Writing and reading a plan gives an equal plan.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.plan.block_plan import BlockPlan, OrderBlock, round_robin, sequential
from hf_helix.planning.plan.list_scheduler import PriorityPlan
from hf_helix.planning.plan.plan import FORMAT, Plan, graphs_digest
from hf_helix.planning.plan.search import Progress, defer_weight_gradients, greedy, search, usual_schedule
from hf_helix.planning.rules.dhelix import dhelix
from hf_helix.planning.schedule.actions import Schedule
from hf_helix.planning.timing.profile import Profile, rough_profile
from hf_helix.planning.window.layout import Layout

OF_BLOCKS: Mapping[str, OrderBlock] = {"sequential": sequential, "round_robin": round_robin, "dhelix": dhelix}
"""The rules that order blocks independently."""

NEED_PROFILE = ("dhelix", "search")
"""The rules that need measured times; other rules also make plans before a measurement."""

ONE_STRAND = "sequential"


def runs_one_strand(name: str) -> bool:
    """Returns whether a rule runs one micro-batch at a time, so that a window may have only one."""
    return name == ONE_STRAND


def make_plan(
    rule: str,
    profile: Profile,
    *,
    model: str,
    mesh: Mapping[str, int],
    schedule: Schedule | None = None,
    progress: Progress | None = None,
    search_share: float = 1.0,
) -> Plan:
    """Returns the plan of a rule.

    Args:
        profile: the times of the operators.
        model, mesh: the model's class and the sizes of the mesh, for plan files.
        schedule: of the window of a searched plan.
        search_share: the length of a search, relative to the usual length.

    Raises:
        KeyError: no rule has this name.
    """
    if rule in OF_BLOCKS:
        return BlockPlan.of(rule, OF_BLOCKS[rule], profile, model=model, mesh=mesh)
    if rule == "greedy":
        found = defer_weight_gradients(greedy(profile), profile, schedule or usual_schedule(profile.layout))
    elif rule == "search":
        found = search(profile, schedule, progress=progress, search_share=search_share)
    else:
        raise KeyError(rule)
    return PriorityPlan(rule, model, dict(mesh), graphs_digest(profile.layout.graphs), found)


def baseline_plan(layout: Layout, *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Returns the plan `sequential`, made without a measurement.

    Args:
        model, mesh: see `make_plan`.
    """
    return make_plan("sequential", rough_profile(layout), model=model, mesh=mesh)


# -- plan files ------------------------------------------------------------------------------------------------------

KINDS: tuple[type[Plan], ...] = (BlockPlan, PriorityPlan)


def load_plan(path: str | Path, pairs: Mapping[str, GraphPair], *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Returns the plan of a file; checks that the file is undamaged and made for this model and mesh.

    Args:
        pairs: the graphs of the model's units.
        model: the model's class.
        mesh: the sizes of the mesh, by the names of their options.

    Raises:
        ValueError: damaged, of another version, or for another model or mesh; names the cause and the remedy.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan={str(path)!r} is neither the name of a rule nor a readable file: {error}") from error
    try:
        return parse_plan(text, pairs, model=model, mesh=mesh)
    except ValueError as error:
        raise ValueError(
            f"plan file {path} {error}\nMake a new one with `hf-helix plan` or `trainer.plan.save(path)`, or use one "
            "of the rules by name, such as plan='auto'"
        ) from error


def parse_plan(text: str, pairs: Mapping[str, GraphPair], *, model: str, mesh: Mapping[str, int]) -> Plan:
    """Returns a plan from its text form; raises the errors of `load_plan`, without the name of the file.

    Args:
        text: of a plan file.
        pairs, model, mesh: see `load_plan`.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise ValueError(f"has format {version!r}, this version reads {FORMAT!r}")
    graphs = graphs_digest(pairs)
    for key, value in {"model": model, "mesh": dict(mesh), "graphs": graphs}.items():
        if data.get(key) != value:
            raise ValueError(f"is for {key} {data.get(key)!r}, this run has {value!r}")
    try:
        kinds = [kind for kind in KINDS if kind.KEY in data]
        if "rule" not in data or len(kinds) != 1:
            raise ValueError(f"it needs `rule`, and one of {', '.join(f'`{kind.KEY}`' for kind in KINDS)}")
        fields = kinds[0].fields_from(data[kinds[0].KEY], pairs)
        return kinds[0](str(data["rule"]), model, dict(mesh), graphs, **fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"is damaged: {what}") from error
