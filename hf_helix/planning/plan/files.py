"""Plan files.

In:   the path or the text of a file, and the model.
Out:  the plan.
Must hold: a damaged file, or a file of another version or for another model, is an error with the remedy. Writing and
reading a plan gives an equal plan.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.plan.baselines.intra_batch import IntraBatchPlan
from hf_helix.planning.plan.block_plan import BlockPlan
from hf_helix.planning.plan.list_scheduler import PriorityPlan
from hf_helix.planning.plan.plan import FORMAT, Plan, graphs_digest

KINDS: tuple[type[Plan], ...] = (BlockPlan, PriorityPlan, IntraBatchPlan)


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
    """Returns a plan from its text form; errors as of `load_plan`, without the name of the file.

    Args:
        text: of a plan file.
        pairs, model, mesh: as of `load_plan`.
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
