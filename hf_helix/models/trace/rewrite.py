"""Rewrites of a trace that leave what it computes, and make it plain how values can be cut.

In:   the graph of `torch.export`, as the code of a model wrote it.
Out:  the same graph without slices and views that show everything, with linears before the views of what they read, and
      with tensors that are filled piece by piece as concatenations. What only changes how a value lies in memory is
      gone.
Must hold: every rewrite is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from hf_helix.models.trace.leaves import OPS

aten = torch.ops.aten
PARTS = ("slice", "select", "view", "reshape", "transpose", "permute", "unsqueeze", "split", "unbind", "expand")
"""Operations that may show the memory of their argument."""

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def rewrite(graph: Graph) -> None:
    """Rewrites a graph in place."""
    for node in list(graph.nodes):
        takes_all = node.target is aten.slice.Tensor and node.args[2:] == (0, sys.maxsize)
        if takes_all or node.target is aten.contiguous.default or _shows_the_same(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        _write_elsewhere(graph, node)
    for node in list(graph.nodes):
        if node.target is OPS.linear.default:
            _put_before_view(graph, node)
        elif node.target is aten.new_empty.default:
            _concatenate(graph, node)


def partial_writes(graph: Graph) -> Iterator[Node]:
    """Yields operations that write over a part of a tensor which is read later: a rewritten graph has lost them."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _name_in_place(node):
            continue
        written: Any = node.args[0]
        shown = [written]
        while any(f"aten.{part}." in str(written.target) for part in PARTS):
            written = written.args[0]
            shown.append(written)
        readers = (user for value in shown for user in value.users if user not in (node, *shown))
        if written.op == "call_function" and any(order[reader] > order[node] for reader in readers):
            yield node


def _shows_the_same(node: Node) -> bool:
    """Returns whether a view has the shape of what it shows."""
    if node.target not in VIEWS:
        return False
    source: Any = node.args[0]
    before, after = ([getattr(size, "node", size) for size in value.meta["val"].shape] for value in (source, node))
    return [getattr(size, "expr", size) for size in before] == [getattr(size, "expr", size) for size in after]


def _name_in_place(node: Node) -> str:
    """Returns the name of an operation that writes over its first argument, such as `add_`; else an empty text."""
    name = str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
    return name if name.endswith("_") and not name.startswith("_") else ""


def _write_elsewhere(graph: Graph, node: Node) -> None:
    """Replaces an operation that writes over its first argument by the one that gives a new tensor."""
    target: Any = node.target
    name = _name_in_place(node)
    plain = getattr(aten, name[:-1], None) if name else None
    if plain is None or node.target is aten.copy_.default:
        return
    if any(f"aten.{part}." in str(getattr(node.args[0], "target", "")) for part in PARTS):
        return  # the tensor that it shows a part of is written, too
    overload = target.name().partition(".")[2] or "default"
    if overload not in plain.overloads():
        return
    with graph.inserting_after(node):
        made = graph.call_function(getattr(plain, overload), node.args, dict(node.kwargs))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    written: Any = node.args[0]
    order = {other: place for place, other in enumerate(graph.nodes)}
    for user in list(written.users):
        if order[user] > order[made]:
            user.replace_input_with(written, made)
    graph.erase_node(node)


def _put_before_view(graph: Graph, linear: Node) -> None:
    """Lets a linear read what a view shows in another shape, if its last dimension is the same; a view follows it."""
    view: Any = linear.args[0]
    if view.target not in VIEWS:
        return
    source = view.args[0]
    before, after = source.meta["val"].shape, view.meta["val"].shape
    if before[-1] != after[-1] or len(before) > 3:
        return
    features = linear.args[2]
    with graph.inserting_after(linear):
        shown = graph.call_function(aten.reshape.default, (linear, [*view.args[1][:-1], features]))
    shown.meta.update(linear.meta)
    linear.replace_all_uses_with(shown, delete_user_cb=lambda user: user is not shown)
    linear.args = (source, *linear.args[1:])
    linear.meta = {**linear.meta, "val": source.meta["val"].new_empty((*before[:-1], features))}
    if not view.users:
        graph.erase_node(view)


def _concatenate(graph: Graph, whole: Node) -> None:
    """Replaces a new tensor, whose parts along one dimension are copied from other tensors, by their concatenation."""
    writes: list[tuple[int, Node, Node, Node]] = []
    others: list[Node] = []
    dims = set()
    for user in whole.users:
        copies = list(user.users)
        if user.target is aten.slice.Tensor and len(copies) == 1 and copies[0].target is aten.copy_.default:
            dims.add(user.args[1])
            writes.append((int(user.args[2]), user, copies[0], copies[0].args[1]))  # type: ignore[arg-type]
        else:
            others.append(user)
    if len(dims) != 1 or any(copy.users for _, _, copy, _ in writes):
        return
    writes.sort(key=lambda write: write[0])
    dim: Any = dims.pop()
    lengths = [source.meta["val"].shape[dim] for *_, source in writes]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    if [start for start, *_ in writes] != starts or sum(lengths) != whole.meta["val"].shape[dim]:
        return
    last = max((copy for _, _, copy, _ in writes), key=list(graph.nodes).index)
    with graph.inserting_after(last):
        joined = graph.call_function(aten.cat.default, ([source for *_, source in writes], dim))
    joined.meta.update(whole.meta)
    for user in others:
        user.replace_input_with(whole, joined)
    for _, part, copy, _ in writes:
        graph.erase_node(copy)
        graph.erase_node(part)
    graph.erase_node(whole)
