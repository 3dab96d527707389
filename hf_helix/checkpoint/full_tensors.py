"""Full tensors of a cut model by their names in a checkpoint, one after the other, with adapters merged.

In:   a cut model, perhaps with LoRA inside.
Out:  names, types and shapes of the tensors; then the tensors, on one rank or on all.
Must hold: names and bits are those of `save_pretrained` of the uncut model after PEFT has merged its adapters; the cut
model is not written to. A parameter is gathered once. The next one is gathered while the caller uses a tensor, if the
two are no larger than the largest parameter; what a caller keeps is its own. Tensors are new memory, or views of
parameters that this rank holds in full.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.core_model_loading import revert_weight_conversion

from hf_helix.checkpoint.files import tensors_on_disk
from hf_helix.checkpoint.reader import Source, match_tensors, persistent_tensors
from hf_helix.models.stock.peft import active_adapters, additions, plain_name
from hf_helix.runtime.distributed.mesh import rank
from hf_helix.runtime.divided import plain_parameters, start_full
from hf_helix.runtime.failures.heartbeat import watched

_NUMBERED = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True)
class Piece:
    """Parameters that become tensors of a checkpoint together, by a single conversion.

    Attributes:
        source: the conversion, by the names of the uncut model.
        held: the parameters, by these names.
        added: of a parameter by its name, PEFT's layer of the adapters that add to it.
        nbytes: of the full parameters.
    """

    source: Source
    held: dict[str, Tensor]
    added: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def part(self) -> str:
        """The part of the model: a layer by its number, or the module of another parameter."""
        name = self.source.target
        numbered = _NUMBERED.match(name)
        return numbered[0] if numbered else name.rpartition(".")[0]

    @property
    def read(self) -> list[Tensor]:
        """All parameters that the tensors are made of, with the weights of adapters."""
        return [*self.held.values(), *(each for layer in self.added.values() for each in _weights(layer).values())]


class FullTensors:
    """The full tensors of a cut model.

    Args:
        base: the Transformers model, perhaps with PEFT's wrappers inside.
        reader: the rank that reads the tensors; None for all ranks.

    Attributes:
        pieces: of the model, in the order of a checkpoint, equal on all ranks.

    Raises:
        ValueError: the model has other tensors than its configuration describes.
    """

    def __init__(self, base: Any, reader: int | None = None) -> None:
        self._reader = reader
        with torch.device("meta"):
            self._bare = type(base)(copy.deepcopy(base.config))
        shapes, tensors = persistent_tensors(self._bare), persistent_tensors(base)
        held = {plain: value for name, value in tensors.items() if (plain := plain_name(base, name)) is not None}
        _check_as_configured(type(base).__name__, held.keys() ^ shapes.keys())
        full = {name: torch.empty(shapes[name].shape, dtype=held[name].dtype, device="meta") for name in shapes}
        self._about = tensors_on_disk(self._bare, full)
        sources, unknown = match_tensors(self._bare, self._about)
        assert not unknown, f"tensors that no parameter is made of: {unknown}"
        added = additions(base)
        self.pieces = [self._piece(source, held, added, full) for source in sources]
        self._most = max(piece.nbytes for piece in self.pieces)

    def _piece(
        self, source: Source, held: dict[str, Tensor], added: dict[Tensor, Any], full: dict[str, Tensor]
    ) -> Piece:
        names = source.convert(self._bare, self._about.__getitem__)
        layers = {name: added[held[name]] for name in names if held[name] in added}
        return Piece(source, {name: held[name] for name in names}, layers, sum(full[name].nbytes for name in names))

    def about(self, pieces: Sequence[Piece]) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Returns name, type and shape of the tensors of pieces, in the order of `read`."""
        return [(name, self._about[name].dtype, self._about[name].shape) for each in pieces for name in _names(each)]

    def read(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of pieces, each with its name; nothing on ranks that do not read. Collective: every rank
        runs it to the end, with the same pieces."""
        started: list[Callable[[], Tensor]] | None = None
        for place, piece in enumerate(pieces):
            waiting = started or self._start(piece)
            following = pieces[place + 1] if place + 1 < len(pieces) else None
            fits = following is not None and piece.nbytes + following.nbytes <= self._most
            started = self._start(following) if following is not None and fits else None
            yield from self._finish(piece, waiting)

    def _start(self, piece: Piece) -> list[Callable[[], Tensor]]:
        """Starts to gather the parameters of a piece."""
        return [start_full(value, self._reader) for value in piece.read]

    def _finish(self, piece: Piece, waiting: list[Callable[[], Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a piece that is being gathered; `waiting` is emptied."""
        with watched():
            values = [waiting.pop(0)() for _ in piece.read]
        if self._reader in (None, rank()):
            full = dict(zip(piece.held, values, strict=False))
            weights = values[len(full) :]
            values.clear()
            for name, layer in piece.added.items():
                own = {each: weights.pop(0) for each in _weights(layer)}
                full[name] = _merged(name, full[name], piece.held[name], layer, own)
            yield from self._converted(piece.source, full)

    def _converted(self, source: Source, full: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors on disk of full parameters: of stacked experts, one expert's at a time."""
        if source.converter is None:
            yield source.names[0], full.pop(source.target)
        elif source.is_stack:
            for place, entry in enumerate(full.pop(source.target).split(1)):
                made = revert_weight_conversion(self._bare, {source.target: entry})
                # The conversion of one expert names it as the first.
                yield from zip(
                    source.part(place, place + 1).names,
                    (made[name] for name in source.part(0, 1).names),
                    strict=True,
                )
        else:
            made = revert_weight_conversion(self._bare, full)
            yield from ((name, made[name]) for name in source.names)


def _names(piece: Piece) -> Iterator[str]:
    """The names of the tensors of a piece, in the order in which they are made."""
    source = piece.source
    if source.is_stack:
        for place in range(len(next(iter(source.keys.values())))):
            yield from source.part(place, place + 1).names
    else:
        yield from source.names


def _check_as_configured(kind: str, differing: set[str]) -> None:
    if differing:
        raise ValueError(
            f"{kind}: the model and its configuration differ in {sorted(differing)[0]} and {len(differing) - 1} other "
            "tensors, so that nobody could load it: change model.config with the model, before the trainer is made"
        )


# -- adapters --------------------------------------------------------------------------------------------------------


def _weights(layer: Any) -> dict[str, nn.Parameter]:
    """Returns the weights of a layer's active adapters by their names in the layer."""
    names = {f".{adapter}." for adapter in active_adapters(layer)}
    own = {name: each for name, each in layer.named_parameters() if not name.startswith("base_layer.")}
    return {name: each for name, each in own.items() if any(adapter in f"{name}." for adapter in names)}


class _Merge(nn.Module):
    """A parameter with an adapter of PEFT, as `merge_adapter` rounds it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, parameter: Tensor, adapter: str, is_bias: bool) -> Tensor:
        layer = self.layer
        if is_bias:
            return parameter.add_(layer.lora_B[adapter].bias * layer.scaling[adapter])
        delta: Tensor = layer.get_delta_weight(adapter)
        if adapter not in layer.lora_magnitude_vector:
            return parameter.add_(delta)
        dora = layer.lora_magnitude_vector[adapter]
        is_turned = dora.fan_in_fan_out  # the weight is [features in, features out]
        gain = dora.weight / dora.get_weight_norm(parameter, delta.t() if is_turned else delta, scaling=1)
        merged = (parameter + delta) * (gain if is_turned else gain.unsqueeze(1))
        return merged.to(parameter.dtype)


@torch.no_grad()
@plain_parameters()
def _merged(name: str, full: Tensor, held: Tensor, layer: Any, weights: dict[str, Tensor]) -> Tensor:
    """Returns a full parameter with its adapters, as `merge_adapter` of PEFT rounds it.

    Args:
        name: of the parameter.
        full: its full values; written to, if they are not the parameter itself.
        held: the parameter of this rank.
        layer: PEFT's layer.
        weights: the full weights of the active adapters, by their names in the layer.
    """
    merged = full.clone() if full.data_ptr() == held.data_ptr() else full
    swapped = {f"layer.{key}": value for key, value in weights.items()}
    for adapter in active_adapters(layer):
        merged = functional_call(_Merge(layer), swapped, (merged, adapter, name.endswith(".bias")))
    return merged
