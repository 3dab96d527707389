"""Completions by vLLM: the cut model's weights, as TRL's `VLLMGeneration` sends them, and its prompts.

In:   a trainer of TRL with `use_vllm=True` whose model is cut; its `VLLMGeneration`, already connected.
Out:  full tensors by their names in a checkpoint, with adapters merged, sent by TRL's own client; the completions of
      each batch, equal on all ranks that share it.
Must hold: rank 0 reads tensors for a server, every rank for vLLM in its own process. A part of the model (a layer, the
embedding, the head) is sent again only if it may have changed: vLLM loads fused weights, such as q, k and v, together.
TRL is not imported.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_helix.checkpoint.full_tensors import FullTensors, Piece
from hf_helix.engine.engine import Engine
from hf_helix.engine.verification import digest
from hf_helix.integrations.trainer.trl import gathering_once
from hf_helix.runtime.distributed.agreement import agree_on_action, all_gather_object, sum_over_ranks
from hf_helix.runtime.distributed.mesh import rank
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.heartbeat import watched

_GENERATION = "trl.generation.vllm_generation"
_INSTEAD = "use use_vllm=False, with which the cut model generates"


def check_rollouts(args: Any, model: Any) -> None:
    """Refuses models that vLLM cannot be sent, before they are cut.

    Raises:
        ValueError: the model has weights in 4 bits.
    """
    if getattr(args, "use_vllm", False) and getattr(model, "is_loaded_in_4bit", False):
        raise ValueError(
            f"use_vllm=True with a base in 4 bits, whose packed weights vLLM does not load: {_INSTEAD}, or load the "
            "base in bf16"
        )


def feed_rollouts(trainer: Any, engine: Engine) -> None:
    """Makes the `VLLMGeneration` of a trainer, if it has one, send the weights of the cut model, and answer ranks that
    share a batch alike.

    Raises:
        ValueError: the class asks vLLM in another way.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is not None:
        weights = _SentWeights(engine, generation)
        generation.sync_weights = functools.partial(weights.send, generation.sync_weights)
        generation._iter_named_params = weights.tensors
        if engine.mesh.ranks_per_batch > 1:
            generation.accelerator = trainer.accelerator
            ask = _asked_once if generation.mode == "server" else _shared_out
            generation.generate = functools.partial(ask, generation.generate, engine.mesh.ranks_per_batch)
    elif getattr(trainer.args, "use_vllm", False):
        kind = type(trainer).__name__
        raise ValueError(f"use_vllm=True: {kind} has no vllm_generation, by which TRL's classes ask vLLM; {_INSTEAD}")


class _SentWeights:
    """The weights that vLLM has been sent."""

    def __init__(self, engine: Engine, generation: Any) -> None:
        self._engine, self._generation = engine, generation
        self._tensors = FullTensors(engine.base, 0 if generation.mode == "server" else None)
        self._sent: dict[str, list[int]] = {}  # by part, the digests of this rank's values; none of a trained part
        self._now: list[Piece] = []

    def send(self, stock: Callable[[], None]) -> None:
        """Sends what may have changed by TRL's own method. Collective."""
        with watched():
            agree_on_action("weights are sent to vLLM")
            self._now = self._changed()
        self._generation._weight_metadata = [
            (name, str(dtype).removeprefix("torch."), list(shape))
            for name, dtype, shape in self._tensors.about(self._now)
        ]
        stock()
        self._now = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what is sent now. Collective."""
        yield from self._tensors.read(self._now)

    def _changed(self) -> list[Piece]:
        """Returns the pieces of all parts that may have changed since they were sent, on any rank. Collective."""
        parts: dict[str, list[Piece]] = {}
        for piece in self._tensors.pieces:
            parts.setdefault(piece.part, []).append(piece)
        states = {part: self._state(pieces) for part, pieces in parts.items()}
        forgets = bool(self._generation.mode == "colocate" and self._generation.enable_sleep_mode)
        changed = [forgets or not state or self._sent.get(part) != state for part, state in states.items()]
        self._sent = states
        counts = sum_over_ranks(list(map(int, changed)))
        return [piece for pieces, count in zip(parts.values(), counts, strict=True) if count for piece in pieces]

    def _state(self, pieces: list[Piece]) -> list[int]:
        """Returns the digests of this rank's values of a part; nothing if the part is trained."""
        read = [value for piece in pieces for value in piece.read]
        if any(value.requires_grad for value in read):
            return []
        with plain_parameters():
            held = [getattr(value, "_shard", None) for value in read]
            values = [value if shard is None else shard for value, shard in zip(read, held, strict=True)]
            return [int(digest(value)) for value in values]


def _asked_once(generate: Callable[..., Any], ranks_per_batch: int, *args: Any, **kwargs: Any) -> Any:
    """Asks the server for the completions of each batch once."""
    with gathering_once(ranks_per_batch, (_GENERATION,)):
        return generate(*args, **kwargs)


def _shared_out(
    generate: Callable[..., Any], ranks_per_batch: int, prompts: list[Any], images: Any, *args: Any, **kwargs: Any
) -> Any:
    """Completes the prompts of a batch in the processes of its ranks, each an equal share; the last prompts of a batch
    that does not divide are completed twice."""
    if not prompts:
        return generate(prompts, images, *args, **kwargs)
    count, first = -(-len(prompts) // ranks_per_batch), rank() // ranks_per_batch * ranks_per_batch
    places = [min(rank() % ranks_per_batch * count + place, len(prompts) - 1) for place in range(count)]
    mine = None if images is None else [images[place] for place in places]
    found = generate([prompts[place] for place in places], mine, *args, **kwargs)
    with watched():
        of_ranks = all_gather_object(found, range(first, first + ranks_per_batch))
    return tuple(
        None if column[0] is None else [*itertools.chain(*column)][: len(prompts)]
        for column in zip(*of_ranks, strict=True)
    )
