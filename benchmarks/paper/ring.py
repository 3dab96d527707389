"""The ring of Megatron-LM's context parallelism, which all methods of the paper run.

In:   the amounts of a rank whose layers run our ring.
Out:  the same amounts, with another order of backward.
Must hold: what every operator computes and sends stays as it is.

Megatron-LM leaves the ring to Transformer Engine (`AttnFuncWithCPAndKVP2P`). Its backward begins with the keys and
values that forward ended with, and sends the others round the ring only from then on: each step beside the backward of
one block of attention, the gradients of the block before beside the next one. Ours begins to fetch keys and values with
the backward of the layer, beside that of the MLP. In the canonical order, which a plan may change:

    ours    ring1.again, ring2.again beside the MLP | block2 | ring2 beside block1 | ring1 beside block0
    here    MLP | ring1.again beside block2 | ring2, ring2.again beside block1 | ring1 beside block0
"""

from dataclasses import replace

from hf_helix.doctor.amounts.records import Amounts
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph, Operator, Part

JOIN, BLOCK, RING = "attention.join", "attention.block{}", "attention.ring"


def with_megatron_ring(amounts: Amounts) -> Amounts:
    """Returns the amounts with backward passes whose rings are Megatron-LM's; the same without context parallelism.

    Args:
        amounts: of a rank.
    """
    graphs = {name: replace(pair, backward=_in_attention(pair)) for name, pair in amounts.layout.graphs.items()}
    return replace(amounts, layout=replace(amounts.layout, graphs=graphs))


def _in_attention(pair: GraphPair) -> Graph:
    """Returns the backward graph with keys and values that are fetched beside blocks of attention."""
    graph = pair.backward
    fetches = [op for op in graph.operators if op.part is Part.R and op.name.startswith(RING)]
    brought = [value for op in fetches for value in op.writes]
    recomputes = any(op.part is Part.R and op not in fetches and {*op.reads} & {*brought} for op in graph.operators)
    if not fetches or recomputes:  # what is recomputed needs all keys and values first
        return graph
    gradients = tuple(value for value in graph[JOIN].reads if value.startswith("d."))
    changed: dict[str, list[Operator]] = {}
    for step in range(len(fetches) + 1):
        block = graph[BLOCK.format(len(fetches) - step)]
        own = tuple(value for value in block.reads if value not in brought)
        arrived = fetches[step - 1].writes if step else ()  # the first block has its keys from forward
        beside = [replace(fetch, control_deps=gradients) for fetch in fetches[step : step + 1]]
        changed[block.name] = [*beside, replace(block, reads=own, control_deps=(*block.control_deps, *arrived))]
    kept = (op for op in graph.operators if op not in fetches)
    return replace(graph, operators=tuple(each for op in kept for each in changed.get(op.name, [op])))
