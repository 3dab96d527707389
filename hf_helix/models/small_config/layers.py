"""Few layers: which layers of a model a small one keeps.

In:   the fields of a configuration.
Out:  the fields with two to four layers, which show every kind of layer that the configuration has.
Must hold: lists with an entry for each layer, lists of layers, and numbers of first or last layers fit the layers that
stay, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEWEST, MOST = 2, 4

COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
"""Fields that count all layers."""

FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index", "num_hash_layers")
LAST = ("num_kv_shared_layers",)
"""Fields that say how many layers at the start, or at the end, are of another kind."""

PLACES = ("mlp_only_layers", "full_attn_idxs", "moe_layers", "hybrid_layer_ids", "local_layer_ids", "ple_layer_ids")
"""Fields that list the layers of a kind."""

PERIODS = {
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "decoder_sparse_step": "",
    "global_attn_every_n_layers": "",
    "interleave_moe_layer_step": "",
    "layer_group_size": "",
    "moe_layer_interval": "",
    "n_layers_per_attn_res_block": "",
    "no_rope_layer_interval": "",
    "sliding_window_pattern": "",
}
"""Fields that say that every n-th layer is of another kind, with the field that says which is the first of them."""

Values = dict[str, Any]
Features = list[Any]
"""What a field says of each layer."""


def shorten(given: Mapping[str, Any], standard: Mapping[str, str], fewest: int = FEWEST) -> Values:
    """Returns the fields of a configuration with few layers.

    Args:
        given: the fields.
        standard: what most configurations call a field, for fields of another name.
        fewest: the number of layers that stay at least, where there are so many.
    """
    values = dict(given)
    counts = [name for name in values if standard.get(name, name) in COUNTS and isinstance(values[name], int)]
    if not counts:
        return values
    count = values[counts[0]]
    said = {name: features for name, value in values.items() if (features := _features(name, value, count))}
    kinds = list(zip(*([str(each) for each in features] for features in said.values()), strict=True))
    kept = _kept(kinds, count, fewest)
    for name, features in said.items():
        values[name] = _restricted(name, features, kept)
    values.update(dict.fromkeys(counts, len(kept)))
    for name, offset in PERIODS.items():
        if isinstance(values.get(name), int):
            values[name] = min(values[name], FEWEST)
            if offset:
                values[offset] %= FEWEST
    return values


def _features(name: str, value: Any, count: int) -> Features | None:
    """Returns what a field says of each layer, or None for a field that does not tell layers apart."""
    if name in FIRST and isinstance(value, int):
        return [layer < value for layer in range(count)]
    if name in LAST and isinstance(value, int):
        return [layer >= count - value for layer in range(count)]
    if name in PLACES and isinstance(value, list):
        return [layer in value for layer in range(count)]
    if name == "per_layer_config" and isinstance(value, dict):
        at = {int(layer): changes for layer, changes in value.items()}
        return [at.get(layer) for layer in range(count)]
    if isinstance(value, list) and len(value) == count:
        return value
    return None


def _restricted(name: str, features: Features, kept: list[int]) -> Any:
    """Returns the value of a field for the layers that stay; the reverse of `_features`."""
    of_kept = [features[layer] for layer in kept]
    if name in FIRST or name in LAST:
        return sum(of_kept)
    if name in PLACES:
        return [place for place, feature in enumerate(of_kept) if feature]
    if name == "per_layer_config":
        return {place: changes for place, changes in enumerate(of_kept) if changes}
    return of_kept


def _kept(kinds: list[tuple[str, ...]], count: int, fewest: int) -> list[int]:
    """Returns the layers to keep: the first of each kind; where there are too many, those that show every feature.

    Args:
        kinds: what is said of each layer; empty if nothing tells them apart.
        count: the number of layers.
        fewest: the number of layers that stay at least.
    """
    kept: list[int] = []
    shown: set[tuple[int, str]] = set()
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for layer in first:
        new = set(enumerate(kinds[layer])) - shown
        if len(first) <= MOST or new:
            kept.append(layer)
            shown |= new
    others = [layer for layer in range(count) if layer not in kept]
    return sorted(kept + others[: max(0, fewest - len(kept))])
