"""The base of model families: from a Transformers model and its batches to units and their side inputs.

In:   an ordinary Transformers causal language model and the axes to cut it over.
Out:  the units of the embedding, of every decoder layer and of the head, and the side inputs of a batch.
Must hold: a family states only the differences from Llama.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.models.derived.towers import Towers
from hf_helix.models.graph.balance import BALANCE, Balance
from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import LossTweaks, ParallelContext
from hf_helix.models.stock.alike import description
from hf_helix.models.stock.batch_inputs import SequenceCut, document_ends, documents_of, form_of, starts_of, targets_of
from hf_helix.models.stock.copies import as_made
from hf_helix.models.stock.four_bit import matrix_sizes
from hf_helix.operators.attention.ring_attention import ABSENT, DOCUMENTS, MASKED
from hf_helix.operators.base import Tensors
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.vocabulary.loss import IGNORED
from hf_helix.planning.graph.backward import GraphPair
from hf_helix.planning.graph.operator import Graph


class Family(ABC):
    """A model family. It must define `layer` and `attention_inputs`, and overrides the differences from Llama.

    Attributes:
        model_class: the name of the Transformers class, for example "LlamaForCausalLM".
        packs_by_positions: whether attention stays within documents if positions start anew. Some models of
            Transformers make their masks without positions.
        needs_proof: whether a model of the family is compared with the unsplit model before its first training, see
            `hf_helix.engine.proof.first_use`.
        is_recurrent: whether layers mix tokens by a recurrence or a convolution.
        towers: of images, next to the language model; None for a model without them.
        unread: entries of a batch that the cut model would not read; for each, its purpose and the alternative.
        traced: if the operators come from the model's own code, patched forwards included: the forward of each
            module at the time of the trace, by the module's id.
    """

    model_class: str
    packs_by_positions: bool = True
    needs_proof: bool = False
    is_recurrent: bool = False
    towers: Towers | None = None
    unread: Mapping[str, str] = MappingProxyType({})
    traced: Mapping[int, Any] = MappingProxyType({})

    @abstractmethod
    def layer(self, b: Builder, layer: Any) -> Unit:
        """Declares one decoder layer: `x` [sequence shard, batch, hidden] enters, and a value of that shape leaves."""

    def digest(self, model: Any) -> str:
        """Returns the key of kept proofs: a text that differs between models with different computations."""
        return ""

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns the decoder layers in order."""
        return model.model.layers

    def final_norm(self, model: Any) -> nn.Module:
        """Returns the norm between the last layer and the head."""
        return model.model.norm

    def embedding(self, b: Builder, model: Any) -> Unit:
        """Declares the embedding of side input `ids`; side input `token_positions` has their positions."""
        x = b.reduce_scatter("scatter", b.lookup("lookup", model.get_input_embeddings()))
        return b.build(x, *self.balance_start(b, model))

    def head(self, b: Builder, model: Any) -> Unit:
        """Declares the unit between the last layer and the loss."""
        x, balance = b.input("x"), self.balance(model)
        if balance is None:
            return b.build(self.loss(b, model, x))
        sums = b.input(BALANCE)
        return b.build(balance.add_loss(b, self.loss(b, model, x), sums))

    def balance(self, model: Any) -> Balance | None:
        """Returns the load-balancing loss in the model's loss; None for a model without.

        With a load-balancing loss, every layer takes the value `BALANCE` after `x` and passes it on, see
        `models.graph.balance.add_part`.
        """
        return None

    def balance_start(self, b: Builder, model: Any) -> tuple[str, ...]:
        """Adds the values that the embedding passes to the layers after `x`: sums of the load-balancing loss."""
        balance = None if b.loss_tweaks.ends_at_decoder else self.balance(model)
        return () if balance is None else (balance.start(b),)

    def output(self, b: Builder, model: Any, below: Collection[nn.Parameter] | None) -> Unit:
        """Declares the unit between the last layer and the decoder's output, which every rank has in full
        [sequence, batch, hidden]: for losses of the caller's own.

        Args:
            b: the builder of the unit.
            model: the Transformers model.
            below: the parameters of all other units; None if not all are declared.
        """
        output = self.decoder_output(b, model, b.input("x"))
        for name, axis in (("gather.tp", b.tp), ("gather.cp", b.cp)):
            output = b.replicate(name, output, axis)
        b.place_above(model, below)
        return b.build(output)

    def decoder_output(self, b: Builder, model: Any, x: str) -> str:
        """Declares the decoder's computation after its last layer.

        Args:
            b: the builder of the unit.
            model: the Transformers model.
            x: the name of the last layer's output, [sequence / tp_size, batch, hidden].
        """
        return b.norm("norm", self.final_norm(model), x, lowers=False)

    def decoder(self, model: Any) -> nn.Module:
        """Returns the submodule that runs the layers."""
        first = next(iter(self.layers(model)))
        return next(
            module
            for module in model.modules()
            if any(isinstance(child, nn.ModuleList) and first in list(child) for child in module.children())
        )

    def loss(self, b: Builder, model: Any, x: str) -> str:
        """Declares norm, head and loss of the tokens. Changes of the logits are added before `b.loss`.

        Args:
            b: the builder of the head.
            model: the Transformers model.
            x: the name of the last layer's output, [sequence / tp_size, batch, hidden].
        """
        h = b.norm("norm", self.final_norm(model), x)
        h = b.all_gather("gather", h)
        head = model.get_output_embeddings()
        (logits,) = b.column_parallel("head", {"logits": head}, h)
        return b.loss("loss", logits, head.weight.shape[0])

    def check(self, config: Any, tp_size: int) -> None:
        """Raises ValueError, with the option and a value that works, if `tp_size` ranks cannot share the model."""
        heads = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
        check_cuts(tp_size, heads, {name: getattr(config, name) for name in ("vocab_size", "intermediate_size")})

    def check_context(self, model: Any) -> None:
        """Raises ValueError if the attention of the model cannot be cut over context-parallel ranks."""
        raise ValueError(
            f"cp_size above 1 is not built for {type(model).__name__}: its declaration has no attention over a shared "
            "sequence (models.graph.attention.declare_attention); use cp_size=1 and tp_size or pp_size instead"
        )

    def check_experts(self, model: Any, sharing: ParallelContext) -> None:
        """Raises ValueError if the experts of the model cannot be spread over the ranks of `sharing`."""
        options = ("ep_size", sharing.ep_size > 1, 1), ("expert_capacity_factor", sharing.capacity_factor, None)
        for name, given, usual in options:
            if given:
                raise ValueError(
                    f"{name} is given, and {type(model).__name__} has no experts; use {name}={usual}, or a model with "
                    "experts, such as PhimoeForCausalLM"
                )

    def units(
        self,
        model: Any,
        sharing: ParallelContext,
        loss_tweaks: LossTweaks | None = None,
        layer_indices: Collection[int] | None = None,
    ) -> list[Unit]:
        """Returns the units of the model in forward order: the embedding, the layers, the head.

        Args:
            model: the uncut Transformers model.
            sharing: the axes to cut the model over.
            loss_tweaks: changes of the loss by training arguments.
            layer_indices: indices of the layers whose units are returned; None for all layers.

        Raises:
            ValueError: the model cannot be cut over these axes; names the option and a value that works.
        """
        self.check(model.config, sharing.tp.size)
        self.check_experts(model, sharing)
        if sharing.cp.size > 1:
            self.check_context(model)
        units = [self.embedding(Builder("embedding", "embedding", sharing, loss_tweaks=loss_tweaks), model)]
        for index, layer in enumerate(self.layers(model)):
            if layer_indices is not None and index not in layer_indices:
                continue
            b = Builder("layer", f"layers.{index}", sharing, repeats=True, loss_tweaks=loss_tweaks)
            units.append(self.layer(b, layer))
        b = Builder("head", "head", sharing, loss_tweaks=loss_tweaks)
        if not b.loss_tweaks.ends_at_decoder:
            units.append(self.head(b, model))
        else:
            below = {parameter for unit in units for parameter in unit.placements}
            units.append(self.output(b, model, below if layer_indices is None else None))
        return number_distinct_graphs(units)

    def layer_key(self, model: Any, index: int) -> str:
        """Returns a text of code, options and sizes; layers with equal texts are declared alike."""
        return description(self.layers(model)[index])

    def notices(self, model: Any, tp_size: int) -> list[str]:
        """Returns lines for the start of a run: parts of a full model that run in a way with a cost."""
        return []

    def loss_adds_up(self, model: Any) -> bool:
        """Returns whether the loss of a batch is the sum of the losses of its rows."""
        return self.balance(model) is None

    def reads_images(self, batch: Mapping[str, Any]) -> bool:
        """Returns whether a batch has images, which have no row for each sequence, and which a tower reads."""
        return self.towers is not None and self.towers.have_images(batch)

    def trains_towers(self) -> bool:
        """Returns whether parameters are trained that only a batch with images gives gradients."""
        return self.towers is not None and self.towers.are_trained

    def side_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the submodules that are called to make side inputs, for example a rope."""
        return ()

    def unread_parameters(self, model: Any) -> Collection[nn.Parameter]:
        """Returns the parameters that the model's code never reads: a script has added them to the class's own."""
        made = as_made(model)
        return {parameter for name, parameter in model.named_parameters() if _is_added(name, model, made)}

    def num_positions(self, model: Any) -> int | None:
        """Returns the rows of the table of positions; None if every position has an embedding."""
        return None

    def token_shape(self, model: Any) -> tuple[int, ...]:
        """Returns the shape of a layer's output for each token: its features, perhaps in several streams."""
        return (model.get_input_embeddings().weight.shape[1],)

    def empty(
        self, model: Any, tp_size: int, ends_at_decoder: bool = False, dtype: torch.dtype | None = None
    ) -> Callable[[Mapping[str, Any]], Tensors]:
        """Returns a function of the side inputs that allocates a layer's outputs: [sequence shard, batch, hidden], and
        the sums of a load-balancing loss. Called after the units are declared and before the model is cut.

        Args:
            model: the Transformers model.
            tp_size: the number of tensor-parallel ranks.
            ends_at_decoder: whether the caller computes the loss, so that layers pass no sums on.
            dtype: of the outputs; None for the type of the embedding.
        """
        shape, dtype = self.token_shape(model), dtype or model.get_input_embeddings().weight.dtype
        balance = None if ends_at_decoder else self.balance(model)

        def make(side: Mapping[str, Any]) -> Tensors:
            ids = side["ids"]
            x = torch.empty(ids.shape[0] // tp_size, ids.shape[1], *shape, dtype=dtype, device=ids.device)
            return (x,) if balance is None else (x, balance.empty(ids.device))

        return make

    def head_cost(self, model: Any) -> float:
        """Returns the work of head and loss relative to a layer's work, by the sizes of the matrices."""
        layer, head = next(iter(self.layers(model))), model.get_output_embeddings()
        matrices = sum(matrix_sizes(layer).values())
        return 0.0 if head is None else float(head.weight.numel() / matrices)

    @property
    def first_least(self) -> int:
        """The fewest layers of the first pipeline stage of the latest units, see `count_layers`."""
        return 0

    def embedding_cost(self, model: Any, image_share: float) -> float:
        """Returns the work of a tower relative to a layer's work, by the sizes of the matrices; `image_share` is the
        part of the tokens that are of images."""
        if self.towers is None or not image_share:
            return 0.0
        return image_share * self.towers.work / sum(matrix_sizes(self.layers(model)[0]).values())

    def side_inputs(
        self, model: Any, batch: Mapping[str, Any], cut: SequenceCut, loss_scale: Tensor, batch_scale: float = 1.0
    ) -> dict[str, Any]:
        """Returns the tensors of a micro-batch without gradient, for this rank's tokens, sequence first.

        Args:
            model: the Transformers model.
            batch: from the data collator: `input_ids` [batch, sequence] and, if given, `attention_mask`,
                `position_ids`, `labels` or `shift_labels`.
            cut: selects this rank's tokens; a sequence that does not divide is padded.
            loss_scale: the factor of the summed loss of the tokens.
            batch_scale: the factor of a loss of the full batch.
        """
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        counted = self.count_positions(ids, mask) if positions is None else positions
        side = {
            "ids": cut.take(ids, 1).t().contiguous(),
            "token_positions": cut.take(counted, 1).t(),
            "targets": cut.take(targets_of(batch), 1, IGNORED).t().contiguous(),
            "length": ids.shape[1],
            "loss_scale": loss_scale,
        }
        form = form_of(batch)
        if cut.cp_size == 1:
            is_packed = form.starts_anew and mask is None and self.packs_by_positions
            documents = starts_of(counted).cumsum(1) if is_packed else None
            side["ends"] = document_ends(counted, form) if form.starts_anew and len(ids) == 1 else {}
            hiding = mask if form.is_masked else None
            return {**side, **self.attention_inputs(model, ids, hiding, counted, documents)}
        documents = documents_of(ids, mask, positions if self.packs_by_positions else None, form)
        if documents is not None:
            extra = cut.padded(ids.shape[1]) - ids.shape[1]
            documents = functional.pad(documents, (0, extra), value=ABSENT)
        side |= {DOCUMENTS: documents, MASKED: mask is not None}
        return {**side, **self.context_inputs(model, ids, counted, cut)}

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Raises ValueError for a batch with inputs that the cut model would not read, see `unread`."""
        for name, instead in self.unread.items():
            if batch.get(name) is not None:
                raise ValueError(f"the batch has {name}, {instead}")
        if self.towers is not None:
            self.towers.check_batch(batch)

    def count_positions(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the positions [batch or 1, sequence] of tokens given without positions: from 0 on, padding counted.

        `ids` are the tokens [batch, sequence], `mask` is the batch's `attention_mask`.
        """
        return torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)

    @abstractmethod
    def attention_inputs(
        self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, documents: Tensor | None
    ) -> dict[str, Any]:
        """Returns masks and positions as inputs of the layers' attention, for the length without padding.

        Args:
            model: the Transformers model.
            ids: the tokens [batch, sequence].
            mask: hides some of the tokens; None if none is hidden.
            positions: the positions of the tokens [batch or 1, sequence].
            documents: the document of every token [batch or 1, sequence] in a packed batch, else None; a token attends
                to tokens of its own document only.
        """

    def context_inputs(self, model: Any, ids: Tensor, positions: Tensor, cut: SequenceCut) -> dict[str, Any]:
        """Returns layers' inputs made of the positions of this rank's tokens: computed for the full sequence, then cut.

        Args:
            model: the Transformers model.
            ids: the tokens [batch, sequence].
            positions: the positions of the tokens [batch or 1, sequence].
            cut: selects this rank's tokens.
        """
        return {}


def number_distinct_graphs(units: Sequence[Unit]) -> list[Unit]:
    """Numbers the names of units with different graphs (other weights are trained), so that a name means one graph."""
    known: dict[str, list[tuple[Graph, str]]] = {}
    taken = {unit.name for unit in units}
    named = []
    for unit in units:
        graph = unit.graphs.forward
        alike = known.setdefault(graph.name, [])
        name = next((name for other, name in alike if other == graph), "")
        if not name:
            numbered = (f"{graph.name}.{number}" for number in count(len(alike) + 1))
            name = next(each for each in numbered if each not in taken) if alike else graph.name
            taken.add(name)
            alike.append((graph, name))
        if name != graph.name:
            unit = replace(unit, graphs=GraphPair.of(replace(graph, name=name)))
        named.append(unit)
    return named


def check_cuts(
    tp_size: int, heads: Mapping[str, int], lengths: Mapping[str, int], shared: Collection[str] = ()
) -> None:
    """Raises ValueError unless all ranks get equal numbers of heads, and equal parts of every cut dimension.

    Args:
        tp_size: the number of tensor-parallel ranks.
        heads: the numbers of heads, by their names.
        lengths: the lengths of dimensions, by their options.
        shared: the names of heads that several ranks may share.
    """

    def fits(size: int) -> bool:
        return all(count % size == 0 or (name in shared and size % count == 0) for name, count in heads.items())

    if not fits(tp_size):
        works = [size for size in range(1, max(heads.values()) + 1) if fits(size)]
        counts = " and ".join(f"{count} {name}" for name, count in heads.items())
        raise ValueError(
            f"tp_size={tp_size} must divide the model's {counts}; values that work: {', '.join(map(str, works))}; "
            "or use pp_size, which cuts no heads"
        )
    shortest = min(lengths.values())
    if shortest < tp_size:
        given = ", ".join(f"{name}={length}" for name, length in lengths.items())
        raise ValueError(
            f"tp_size={tp_size} leaves ranks without a row of a dimension of {shortest} ({given}); "
            f"use tp_size={shortest} or less"
        )


def _is_added(name: str, model: Any, made: Any) -> bool:
    """Returns whether a parameter lies in a part that a module of the class does not have."""
    for part in name.split("."):
        if type(model) is not type(made):  # replaced or wrapped, such as by PEFT
            return False
        if not hasattr(made, part):
            return True
        model, made = getattr(model, part), getattr(made, part)
    return False
