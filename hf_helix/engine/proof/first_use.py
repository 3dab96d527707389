"""Proof on first use: a derived family is proven before the model of a run is cut.

In:   the full model of a run, its options and its mesh.
Out:  nothing, or an error on all ranks that names the differences.
Must hold: a small model of the same class is proven, patched as the model of the run is, on the run's own mesh, all
ranks together; a patch that cannot be carried over is refused by name. A verdict is found again only by its own case
(the model's graphs, their source, versions, layout). The random state of the run is as before, the given model is only
looked at, and nothing of the proof stays in memory.

    family needs no proof, or its case is on disk  -> go on
    small model + patches of the run's model       -> prove: cut and unsplit are equal?  -> keep the verdict
"""

import contextlib
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hf_helix.config import AUTO, SCHEDULES, HelixConfig
from hf_helix.engine.proof.prove import Subject, describe, prove
from hf_helix.engine.proof.verdict import Proof, first_names
from hf_helix.measure.cache_folder import write_file
from hf_helix.models.registry import family_of
from hf_helix.models.stock.alike import digest_of_code, text_of
from hf_helix.models.stock.copies import as_made, rebound
from hf_helix.models.trace.calls import Decoder
from hf_helix.models.trace.mixers import PACKAGES
from hf_helix.planning.text import format_json
from hf_helix.runtime.distributed.agreement import decide_on_rank_0, on_all_ranks
from hf_helix.runtime.distributed.mesh import Mesh, mesh_of
from hf_helix.runtime.notices import about_time, say
from hf_helix.tuning.cache import OPERATOR_OPTIONS, result_folder
from hf_helix.version import __version__

CODE = (FunctionType, MethodType, functools.partial, BuiltinFunctionType)
PLAIN = (bool, int, float, str, type(None), torch.dtype)
OF_RUNS = ("training", "gradient_checkpointing", "_gradient_checkpointing_func", "_compiled_call_impl")
"""Attributes that a run sets, or that change no result, or that are refused elsewhere."""

ADVICE = (
    "a derived family is proven on a small model of its class, into which it cannot be carried over; write it into a "
    "class of your own (a subclass of the model), or declare the family (docs/adding_a_model.md)"
)


@dataclass(frozen=True)
class Patch:
    """An attribute of a submodule that differs from its class.

    Attributes:
        path: the submodule.
        name: the attribute.
        value: its value.
        code: the identity of its code.
    """

    path: str
    name: str
    value: Any
    code: str


def carry_patches(model: Any, small: Any) -> None:
    """Gives a small model of the same class, with fewer layers, the patches of a model.

    Raises:
        ValueError: names a patch that cannot be carried over.
    """
    plain, decoder = as_made(model), Decoder(model)
    prefix = decoder.prefix
    inside = {id(module) for layer in decoder.layers for module in layer.modules()}
    unread = _unread(model, plain)
    outside = list(_patches(model, plain, "", lambda module: id(module) in inside or _is_unread(module, unread)))
    sources = _sources(model, plain, small, prefix, unread)
    shared = {id(model.config): small.config, **_pairs(model, small)}
    for patch in outside:
        _put(small, patch, shared)
    for layer, (source, patches) in zip(small.get_submodule(prefix), sources, strict=True):
        memo = {**shared, **_pairs(decoder.layers[source], layer)}
        for patch in patches:
            _put(layer, patch, memo, f"{prefix}.{source}")


def _unread(model: Any, plain: Any) -> Collection[nn.Parameter]:
    """Returns the parameters that no code of a model reads; none if the model is as its class makes it, or cannot be
    traced: then its patches are named."""
    if {name for name, _ in model.named_parameters()} <= {name for name, _ in plain.named_parameters()}:
        return ()
    try:
        return family_of(model).unread_parameters(model)
    except ValueError:
        return ()


def _is_unread(module: nn.Module, unread: Collection[nn.Parameter]) -> bool:
    """Whether no code reads a module: it has parameters, and none of them is read."""
    parameters = list(module.parameters())
    return bool(parameters) and all(parameter in unread for parameter in parameters)


def _sources(
    model: Any, plain: Any, small: Any, prefix: str, unread: Collection[nn.Parameter]
) -> list[tuple[int, list[Patch]]]:
    """Returns for each layer of a small model a layer of the same kind, and its patches.

    Every set of patches of a kind is among them; patches that differ in numbers only are equal.
    """
    layers, made = model.get_submodule(prefix), plain.get_submodule(prefix)
    small_kinds = [_kind(small, layer, number) for number, layer in enumerate(small.get_submodule(prefix))]
    patches: dict[int, list[Patch]] = {}
    ways: dict[Any, dict[Any, list[int]]] = {kind: {} for kind in small_kinds}
    for number, layer in enumerate(layers):
        patches[number] = list(
            _patches(layer, made[number], f"{prefix}.{number}.", lambda module: _is_unread(module, unread))
        )
        way = frozenset((patch.path, patch.name, patch.code) for patch in patches[number])
        kind = _kind(plain, made[number], number)
        groups, count = ways.setdefault(kind, {}), small_kinds.count(kind)
        groups.setdefault(way, []).append(number)
        if len(groups) > max(count, 1 - bool(way)):
            raise ValueError(
                f"model.{prefix}.{number} was changed in another way than {len(groups) - 1} layers before it, of which "
                f"a small model has {count}: {ADVICE}"
            )
    chosen = {kind: _one_of_each(list(groups.values()), small_kinds.count(kind)) for kind, groups in ways.items()}
    numbers = [chosen[kind].pop(0) if chosen[kind] else None for kind in small_kinds]
    return [(number or 0, patches[number] if number is not None else []) for number in numbers]


def _one_of_each(groups: list[list[int]], count: int) -> list[int]:
    """Returns `count` numbers in order: the first of each group, and then others."""
    firsts = [group[0] for group in groups]
    others = [number for group in groups for number in group[1:]]
    return sorted([*firsts, *sorted(others)][:count])


def _kind(model: Any, layer: nn.Module, number: int) -> Any:
    """The kind of a layer: its type and the classes of its modules, without sizes."""
    types = getattr(model.config.get_text_config(), "layer_types", None)
    return types[number] if types else None, *((name, type(module)) for name, module in layer.named_modules())


def _patches(
    given: Any, plain: Any, prefix: str, skip: Callable[[nn.Module], bool] = lambda module: False
) -> Iterator[Patch]:
    """Yields the patches of a module against `plain`, an unpatched module; `prefix` is its path, for errors."""
    names = {id(module): f"module {path}" for path, module in given.named_modules()}
    plain_names = {id(module): f"module {path}" for path, module in plain.named_modules()}
    waiting: list[tuple[str, Any, Any]] = [("", given, plain)]
    while waiting:
        path, module, made = waiting.pop()
        for name, value in _attributes(module, made):
            text = text_of(value, names)
            is_made = name in vars(made) and text == text_of(vars(made)[name], plain_names)
            is_own_forward = name == "forward" and not prefix and not path  # refused elsewhere
            if not is_made and not is_own_forward:
                yield Patch(path, name, value, _code_of(value))
        for name, child in module.named_children():
            inner, other = f"{path}.{name}" if path else name, getattr(made, name, None)
            if skip(child) or type(child).__module__.startswith("peft."):
                continue
            if type(child) is type(other):
                waiting.append((inner, child, other))
            elif other is not None and _has_weights_of(child, other):
                waiting.append((inner, child, other))
                yield Patch(inner, "__class__", type(child), f"{type(child).__module__}.{type(child).__qualname__}")
            elif next(child.parameters(), None) is None and next(child.buffers(), None) is None:
                yield Patch(path, name, child, type(child).__qualname__)
            else:
                instead = "nothing" if other is None else f"a {type(other).__name__}"
                raise ValueError(
                    f"model.{prefix}{inner} is a {type(child).__name__}, where the class makes {instead}: {ADVICE}"
                )


def _has_weights_of(module: nn.Module, other: nn.Module) -> bool:
    """Returns whether a module has parameters and buffers of the same names as another."""
    return all(
        [name for name, _ in getattr(module, kind)()] == [name for name, _ in getattr(other, kind)()]
        for kind in ("named_parameters", "named_buffers")
    )


def _attributes(module: nn.Module, made: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the functions of an instance, and its options that its class also sets."""
    is_other = type(module) is not type(made)
    for name, value in vars(module).items():
        is_option = (is_other or name in vars(made)) and not name.startswith("_") and _is_plain(value)
        if name not in OF_RUNS and (is_option or isinstance(value, CODE)) and not hasattr(value, "is_refusal"):
            yield name, value


def _code_of(value: Any, within: tuple[int, ...] = ()) -> str:
    """Returns the identity of the code of a value, without numbers that the code closes over."""
    if isinstance(value, functools.partial):
        return _code_of(value.func, within)
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType) or id(function) in within:
        return type(value).__qualname__
    cells = [_code_of(cell.cell_contents, (*within, id(function))) for cell in function.__closure__ or ()]
    return f"{function.__module__}.{function.__qualname__} {digest_of_code(function.__code__)} {cells}"


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, PLAIN)


def _pairs(given: nn.Module, small: nn.Module) -> dict[int, Any]:
    """Returns the counterparts in a small module of modules, parameters and buffers of another, by id."""
    counterparts: dict[int, Any] = {}
    for kind in ("named_modules", "named_parameters", "named_buffers"):
        theirs: Mapping[str, Any] = dict(getattr(small, kind)())
        counterparts.update({id(value): theirs[name] for name, value in getattr(given, kind)() if name in theirs})
    return counterparts


def _put(small: Any, patch: Patch, memo: Mapping[int, Any], where: str = "") -> None:
    """Gives a small module a patch."""
    inside = list(map(id, patch.value.modules())) if isinstance(patch.value, nn.Module) else []
    memo = {key: value for key, value in memo.items() if key not in inside}
    try:
        setattr(small.get_submodule(patch.path), patch.name, rebound(patch.value, memo))
    except Exception as error:
        path = ".".join(part for part in (where, patch.path, patch.name) if part)
        raise ValueError(f"model.{path} was changed on the instance ({error}): {ADVICE}") from error


# -- the proof -------------------------------------------------------------------------------------------------------


FORMAT = "hf_helix.proof/1"
PROVEN_OPTIONS = (*OPERATOR_OPTIONS, "recompute", "schedule", "float8", "spread_vocabulary")


def prove_on_first_use(model: Any, config: HelixConfig, mesh: Mesh) -> None:
    """Proves the family of a model, unless the family is declared or was proven on this machine before; with `float8` a
    declared family too, to print the error against bf16. Collective.

    The census proves classes with their default configurations; a checkpoint may switch on more options.

    Raises:
        ValueError: on every rank: the cut model differs from the unsplit model.
    """
    family = on_all_ranks(lambda: family_of(model))
    if not family.needs_proof and not config.float8:
        return
    key = on_all_ranks(lambda: _key(family.digest(model), model, config, mesh))
    if config.cache and decide_on_rank_0(lambda: _was_proven(key)):
        return
    proof = _prove(model, config, mesh)
    if not proof.ok:
        raise ValueError(_advice(proof))
    if config.cache:
        decide_on_rank_0(lambda: _keep(key, proof))
    derived = "derived from the model; " * family.needs_proof
    say(
        f"{proof.model}: {derived}equal to the unsplit model at {proof.layout} ({about_time(proof.seconds)})"
        + "".join(
            f"; {text}" for text in (proof.coverage, proof.float8 and f"on a small model, {proof.float8}") if text
        )
    )


def _prove(model: Any, config: HelixConfig, mesh: Mesh) -> Proof:
    """The proof of a small model of the same class. Collective."""
    options = replace(
        config,
        schedule=config.schedule if config.schedule in SCHEDULES else AUTO,
        profile=None,
        compile=False,
        cuda_graphs=False,
        shard_parameters=False,
        shard_optimizer=False,
        reduce_gradients=AUTO,
        offload=None,
        dp_replicate_size=1,
    )
    if mesh.link is not None:  # an emulated link would only take time
        mesh = mesh_of(replace(config, link=None), mesh.device)
    small, uncovered = on_all_ranks(lambda: _small(model, options))
    return prove(small, options, mesh, uncovered=uncovered)


def _small(model: Any, options: HelixConfig) -> tuple[Any, tuple[str, ...]]:
    """A small model of the same class, with the same patches, and the parts of the model that it lacks."""
    subject = Subject(model.config, type(model))
    small = subject.build(options)
    uncovered = subject.uncovered(small)
    carry_patches(model, small)
    return small, uncovered


def _advice(proof: Proof) -> str:
    """The differences and the remedy, for the error that ends a run."""
    name, layout = proof.model, proof.layout
    if proof.refusal:
        return f"{name} is derived from the model, and a small one of its class cannot be cut: {proof.refusal}"
    wrong = first_names(proof.wrong, lambda difference: f"{difference.name} (by {difference.error:.1e})")
    return (
        f"{name} at {layout} is derived from the model and does not compute what the unsplit model computes: {wrong}"
        f" differ. `hf-helix check {name}` shows which layouts are equal; use one of "
        "them, or the stock Trainer, or declare the family (docs/adding_a_model.md), and please report it"
    )


# -- verdicts on disk ----------------------------------------------------------------------------------------------


def _key(digest: str, model: Any, config: HelixConfig, mesh: Mesh) -> dict[str, str]:
    """The case of a verdict; `digest` is the family's own digest of the model's graphs, patched forwards included."""
    kind = type(model)
    return {
        "proof": f"{kind.__module__}.{kind.__qualname__}",
        "graphs": digest,
        "source": _source_digest(kind),
        "layout": describe({**mesh.sizes, "dp": 1}),
        "options": " ".join(f"{name}={getattr(config, name)}" for name in PROVEN_OPTIONS),
        "attention": str(model.config._attn_implementation),
        "device": mesh.device.type,
        "kernels": _kernels(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "hf_helix": __version__,
    }


def _kernels() -> str:
    """The installed packages with kernels for recurrent layers."""
    found = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _source_digest(kind: type) -> str:
    """A digest of the file of a class; empty without a file, as in a notebook."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()[:12]
    except (OSError, TypeError):
        return ""


def _was_proven(key: Mapping[str, str]) -> bool:
    """Whether the verdict of a key is on disk. Only verdicts of equal models are kept."""
    try:
        verdict = json.loads((result_folder(key) / "proof.json").read_text())
        return bool(verdict["format"] == FORMAT and verdict["case"] == dict(key))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _keep(key: Mapping[str, str], proof: Proof) -> None:
    """Writes a verdict."""
    folder = result_folder(key)
    folder.mkdir(parents=True, exist_ok=True)
    data = {"format": FORMAT, "case": dict(key), "verdict": str(proof)}
    write_file(folder / "proof.json", format_json(data) + "\n")
