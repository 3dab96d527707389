"""PEFT's wrappers around a model and its submodules, for declarations.

In:   a model, perhaps inside a `PeftModel`; a submodule, perhaps with LoRA or inside `modules_to_save`.
Out:  the Transformers model, the plain submodule that computes, its adapters, and all modules that are cut together; or
      an error that names the part that cannot be cut.
Must hold: PEFT's names stay. Active adapters are looked up at every run. peft is not imported here: a PEFT model exists
only after an import of peft.
"""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_helix.models.stock.four_bit import four_bit_of, is_four_bit
from hf_helix.operators.experts.grouped_low_rank import GroupedLowRank
from hf_helix.operators.linears.four_bit import FourBit
from hf_helix.operators.linears.low_rank import LowRank

LORA = "get_peft_model(model, LoraConfig(...))"

# PEFT's variants of LoRA that are built, by the option and by the classes that run them.
_BUILT = "use_dora", "DoraLinearVariant", "DoraEmbeddingVariant"

# Refused options of LoraConfig, each with an alternative. PEFT itself marks further options as variants of LoRA.
_REFUSED = {
    "trainable_token_indices": "rows of a cut table are not picked out; use modules_to_save=['embed_tokens']",
    "layer_replication": "layers would share weights; leave it out",
    "ensure_weight_tying": "matrices that share memory would be cut apart; use ensure_weight_tying=False",
    "use_qalora": "weights of GPTQ cannot be cut; use use_qalora=False, and a base in 16 bits or bitsandbytes' 4 bits",
    "megatron_config": "hf_helix cuts the model itself; leave it out",
}


def is_peft(model: Any) -> bool:
    """Returns whether a model is a `PeftModel`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> Any:
    """Returns the Transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if is_peft(model) else model


@dataclass(frozen=True)
class Unwrapped:
    """A linear or an embedding with PEFT's wrappers.

    Attributes:
        copies: all plain modules, which are cut in the same way: the model's own, then the copies of `modules_to_save`.
        lora: PEFT's layer of adapters; None without adapters.
        wrapper: PEFT's wrapper that selects a copy; None for a single copy.
    """

    copies: tuple[Any, ...]
    lora: Any = None
    wrapper: Any = None

    @property
    def module(self) -> Any:
        """The plain module that computes."""
        if self.wrapper is None or self.wrapper.disable_adapters:
            return self.copies[0]
        active, kept = self.wrapper.active_adapters, self.wrapper.modules_to_save
        return kept[active[0]] if active and all(name in kept for name in active) else self.copies[0]

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias

    @property
    def four_bit(self) -> FourBit | None:
        """The weight, if it is in 4 bits."""
        return four_bit_of(self.copies[0])

    @property
    def projection(self) -> Any:
        """The object whose `weight` is in use: this object with a wrapper, else the plain module (faster)."""
        return self if self.wrapper is not None else self.copies[0]

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is [features in, features out]."""
        return isinstance(self.copies[0], Conv1D)

    def adapters(self) -> list[LowRank]:
        """Returns the active adapters that are not merged into the weights."""
        return [] if self.lora is None else [self._adapter(name) for name in active_adapters(self.lora)]

    def all_adapters(self) -> list[LowRank]:
        """Returns all adapters: inactive adapters are also cut and saved."""
        return [] if self.lora is None else [self._adapter(name) for name in self.lora.scaling]

    def _adapter(self, name: str) -> LowRank:
        lora, scaling = self.lora, float(self.lora.scaling[name])
        magnitude = lora.lora_magnitude_vector[name].weight if name in lora.lora_magnitude_vector else None
        if name in lora.lora_embedding_A:
            down, up = lora.lora_embedding_A[name], lora.lora_embedding_B[name]
            return LowRank(down, up, None, scaling, magnitude=magnitude)
        dropout, up = lora.lora_dropout[name], lora.lora_B[name]
        share = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        return LowRank(lora.lora_A[name].weight, up.weight, up.bias, scaling, share, magnitude)


@dataclass(frozen=True)
class ParameterAdapters:
    """The adapters of a single parameter, made by PEFT's `target_parameters`.

    Attributes:
        lora: PEFT's wrapper of the module with the parameter.
    """

    lora: Any

    def adapters(self) -> list[GroupedLowRank]:
        """Returns the active adapters that are not merged into the parameter."""
        return [self._adapter(name) for name in active_adapters(self.lora)]

    def all_adapters(self) -> list[GroupedLowRank]:
        """Returns all adapters: inactive adapters are also cut and saved."""
        return [self._adapter(name) for name in self.lora.scaling]

    def added_to(self, parameter: Tensor) -> Tensor:
        """Returns the parameter with the additions of its active adapters, as PEFT computes them."""
        for name in active_adapters(self.lora):
            parameter = parameter + self.lora.get_delta_weight(name)
        return parameter

    def _adapter(self, name: str) -> GroupedLowRank:
        lora = self.lora
        return GroupedLowRank(
            lora.lora_A[name].weight, lora.lora_B[name].weight, lora.r[name], float(lora.scaling[name])
        )


class AdaptedOwner:
    """A module's parameter with the additions of its active adapters, as an attribute under the parameter's name."""

    def __init__(self, owner: nn.Module, adapters: ParameterAdapters) -> None:
        self.owner = owner
        self.adapters = adapters

    def __getattr__(self, name: str) -> Tensor:
        parameter: Tensor = getattr(self.owner, name)
        return self.adapters.added_to(parameter)


def active_adapters(lora: Any) -> list[str]:
    """Returns the names of the active adapters of a layer of PEFT that are not merged.

    Raises:
        ValueError: an adapter with a magnitude (DoRA) is active with another one, which it would scale.
    """
    if lora.disable_adapters or lora.merged:
        return []
    problem = _scaled_together(lora)
    if problem:
        raise ValueError(problem)
    return _active(lora)


def _active(lora: Any) -> list[str]:
    return [name for name in lora.active_adapters if name in lora.scaling]


def _scaled_together(lora: Any) -> str:
    """Returns the reason against the active adapters of a layer of PEFT; empty for none."""
    names = _active(lora)
    scaling = [name for name in names if name in lora.lora_magnitude_vector]
    if not scaling or len(names) == 1:
        return ""
    return (
        f"adapters {', '.join(map(repr, names))} are active together, and {scaling[0]!r} has use_dora=True, which "
        f"would scale the others: activate one, model.set_adapter({scaling[0]!r}), or use use_dora=False"
    )


def plain_name(model: nn.Module, name: str) -> str | None:
    """Returns the name that a tensor of a model has without PEFT's wrappers inside of it; None for weights of adapters,
    and for copies of a module that are not in use."""
    module: Any = model
    plain, path = [], iter(name.split("."))
    for part in path:
        if hasattr(module, "modules_to_save"):
            chosen = getattr(module, part)
            chosen = chosen if part == "original_module" else getattr(chosen, next(path))
            if unwrapped(module).module is not chosen:
                return None
            module = chosen
            continue
        if hasattr(module, "lora_A"):
            if part != "base_layer":
                return None
        else:
            plain.append(part)
        module = getattr(module, part)
    return ".".join(plain)


def additions(model: nn.Module) -> dict[Tensor, Any]:
    """Returns the parameters that active adapters of a model add to, each with PEFT's layer of these adapters."""
    found: dict[Tensor, Any] = {}
    modules: list[Any] = list(model.modules())
    for layer in modules:
        if hasattr(layer, "lora_A") and active_adapters(layer):
            base = layer.get_base_layer()
            found[getattr(base, getattr(layer, "parameter_name", "weight"))] = layer
            if any(layer.lora_bias.get(name) for name in active_adapters(layer)):
                found[base.bias] = layer
    return found


def is_parameter_wrapper(module: Any) -> bool:
    """Returns whether a module is PEFT's wrapper of a module with adapters of one of its parameters."""
    return hasattr(module, "lora_A") and hasattr(module, "parameter_name")


def adapters_of_parameters(module: Any) -> dict[str, ParameterAdapters]:
    """Returns the adapters of the parameters of a module inside PEFT's wrappers, by the names of the parameters."""
    adapters = {}
    while is_parameter_wrapper(module):
        adapters[module.parameter_name] = ParameterAdapters(module)
        module = module.base_layer
    return adapters


def adapted_names(module: nn.Module) -> dict[str, str]:
    """Returns the names of weights of adapters of parameters, each with the name of the parameter."""
    names = {}
    for path, wrapper in module.named_modules():
        if is_parameter_wrapper(wrapper):
            base, inside = f"{path}.base_layer", wrapper.base_layer
            while is_parameter_wrapper(inside):
                base, inside = f"{base}.base_layer", inside.base_layer
            own = [name for name, _ in wrapper.named_parameters() if not name.startswith("base_layer.")]
            names.update({f"{path}.{name}": f"{base}.{wrapper.parameter_name}" for name in own})
    return names


def is_plain_linear(module: Any) -> bool:
    """Returns whether a module is a linear that can be cut, without a wrapper."""
    return type(module) in (nn.Linear, Conv1D) or is_four_bit(module)


def unwrapped(module: Any) -> Unwrapped:
    """Returns the modules inside PEFT's wrappers, of any class."""
    if hasattr(module, "modules_to_save"):
        return Unwrapped((module.original_module, *module.modules_to_save.values()), wrapper=module)
    if hasattr(module, "lora_A"):
        return Unwrapped((module.get_base_layer(),), lora=module)
    return Unwrapped((module,))


def unwrap_peft(module: Any, label: str, embeddings_of_subclasses: bool = False) -> Unwrapped:
    """Returns the plain module inside a submodule, with its adapters. `embeddings_of_subclasses` lets subclasses of
    `nn.Embedding` pass, see `Builder.lookup`.

    Raises:
        ValueError: the submodule is neither plain nor a wrapper that can be cut, or an embedding changes its table.
    """
    inside = unwrapped(module)
    for plain in inside.copies:
        kind = f"{type(plain).__module__}.{type(plain).__name__}"
        if isinstance(plain, nn.Embedding) and (plain.max_norm is not None or plain.scale_grad_by_freq):
            raise ValueError(
                f"{label}: the embedding has max_norm={plain.max_norm} and "
                f"scale_grad_by_freq={plain.scale_grad_by_freq}, which a table cut over ranks would ignore; set "
                "embedding.max_norm = None and embedding.scale_grad_by_freq = False"
            )
        if type(plain) is nn.Embedding or is_plain_linear(plain):
            continue
        if not isinstance(plain, nn.Embedding):
            raise ValueError(
                f"{label}: a projection is a {kind}, and this version cuts plain torch.nn.Linear, Transformers' Conv1D "
                f"and bitsandbytes' Linear4bit, also with LoRA beside them: {LORA}; load the model without "
                "quantization_config, or merge the adapters"
            )
        if not embeddings_of_subclasses:
            raise ValueError(
                f"{label}: the embedding is a {kind}, which may do more than look up rows of a table; declare what "
                "else it does (a scale) behind the lookup, and say that you did: b.lookup(name, embedding, plain=True)"
            )
    return inside


def adapter_weights(model: Any) -> set[Tensor]:
    """Returns the weights of adapters, whose dtype may differ from the model's."""
    peft = sys.modules.get("peft")
    layers = [m for m in model.modules() if peft is not None and isinstance(m, peft.tuners.lora.LoraLayer)]
    return {p for layer in layers for name in layer.adapter_layer_names for p in getattr(layer, name).parameters()}


def check_adapters(model: Any) -> None:
    """Refuses all of PEFT but LoRA over plain modules.

    Raises:
        ValueError: names the options or layers, and an alternative.
    """
    peft = sys.modules.get("peft")
    problems = list(_problems(model, peft)) if peft is not None else []
    if problems:
        raise ValueError("HelixTrainer cannot cut these adapters: " + "\n  ".join(problems))


def _problems(model: Any, peft: Any) -> Iterator[str]:
    if isinstance(model, peft.PeftMixedModel):
        yield f"a {type(model).__name__} mixes kinds of adapters: use LoRA alone, {LORA}"
    elif not is_peft(model):
        if any(isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) for module in model.modules()):
            yield (
                f"the {type(model).__name__} has adapters inside and no PeftModel around it: hand over the PeftModel "
                f"itself, made by {LORA} or PeftModel.from_pretrained(model, folder, is_trainable=True), or merge the "
                "adapters with merge_and_unload()"
            )
    else:
        of_configs = [p for name, config in model.peft_config.items() for p in _problems_of_config(name, config)]
        yield from of_configs or _problems_of_layers(model, peft)  # layers would repeat these problems


def _problems_of_config(name: str, config: Any) -> Iterator[str]:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        yield f"adapter {name!r} is made by {type(config).__name__} ({kind}): use {LORA}, or the stock Trainer"
        return
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    for option in dict.fromkeys((*_REFUSED, *variants)):
        value = getattr(config, option, None)
        if value and option not in _BUILT:
            why = _REFUSED.get(option, "only LoRA and DoRA are built; leave it out")
            yield f"adapter {name!r} has {option}={value!r}: {why}"


def _problems_of_layers(model: Any, peft: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            yield from _problems_of_layer(name, module, peft.tuners.lora)
        elif isinstance(module, peft.utils.other.ModulesToSaveWrapper):
            if is_four_bit(module.original_module):
                yield f"{name}, in modules_to_save, has a weight in 4 bits, which cannot be trained: leave it out there"
            elif next(module.original_module.children(), None) is not None:
                yield f"{name} is kept whole by modules_to_save: name the linears, norms or embeddings inside it"
        elif isinstance(module, peft.utils.other.AuxiliaryTrainingWrapper):
            yield f"{name} is a {type(module).__name__}: use target_modules and modules_to_save only"


def _problems_of_layer(name: str, layer: Any, lora: Any) -> Iterator[str]:
    known = {lora.Linear: (nn.Linear, Conv1D), lora.Embedding: (nn.Embedding,)}
    base = layer.get_base_layer()
    if is_parameter_wrapper(layer):
        known[type(layer)] = (type(base),)
    # PEFT scales the adapter's rows as a scaled embedding (Gemma's) scales the rows of its table.
    is_scaled = type(layer) is lora.Embedding and isinstance(base, nn.Embedding) and hasattr(base, "embed_scale")
    is_packed = is_four_bit(base) and type(layer) is lora.Linear4bit
    if type(base) not in known.get(type(layer), ()) and not is_scaled and not is_packed:
        kinds = " over a ".join(f"{type(each).__module__}.{type(each).__name__}" for each in (layer, base))
        yield (
            f"{name} is a {kinds}: only adapters of plain linears and embeddings can be cut; load the model without "
            "quantization_config, or leave the layer out of target_modules"
        )
    elif is_parameter_wrapper(layer) and (isinstance(base, (Conv1D, nn.Embedding)) or is_four_bit(base)):
        yield (
            f"{name} has adapters of its parameter {layer.parameter_name!r} (target_parameters) and is a "
            f"{type(base).__name__}: name it in target_modules instead"
        )
    elif variants := {type(variant).__name__ for variant in layer.lora_variant.values()} - {*_BUILT}:
        yield f"{name} has the variant {', '.join(sorted(variants))}: only LoRA and DoRA are built"
    elif problem := _scaled_together(layer):
        yield f"{name}: {problem}"
    elif layer.merged:
        yield (
            f"{name} has merged adapters ({', '.join(layer.merged_adapters)}): call model.unmerge_adapter(), or go on "
            "with model.merge_and_unload()"
        )
