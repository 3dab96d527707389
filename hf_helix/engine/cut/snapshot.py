"""Copies of operators: the modules, tensors and numbers of a model at the cut.

In:   a model, and the submodules called by operators.
Out:  nothing, or an error that names a change unknown to the operators.
Must hold: submodules called by operators may change at any time, and buffers, which operators look up at every run,
may get other values or be replaced; a comparison takes a fraction of a millisecond.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

Entry = tuple[str, dict[str, Any], str, Any]
"""The name of a module, a dictionary of the module, and a key with its value."""


class Snapshot:
    """The state of a cut model of which its operators have copies.

    Args:
        model: the model.
        modules_run_as_is: the submodules called by operators; they are not compared.
    """

    def __init__(self, model: nn.Module, modules_run_as_is: Collection[nn.Module]) -> None:
        running = {module: None for given in modules_run_as_is for module in given.modules()}
        runs = {id(module) for module in running}
        self._modules = [(name, module) for name, module in model.named_modules() if id(module) not in runs]
        self._structure = list(_tensors_and_modules(model, runs))
        tensors = ((values, key, value) for _, values, key, value in self._structure if isinstance(value, Tensor))
        self._buffers = [(values, key) for values, key, value in tensors if not isinstance(value, nn.Parameter)]
        self._seen = self._marks()
        self._forms = [(name, value, _form(value)) for name, value in model.named_parameters()]
        self._types = [(name, value, value.dtype) for name, value in model.named_parameters()]
        self._adapted = [(name, module) for name, module in model.named_modules() if hasattr(module, "merged_adapters")]
        self._numbers = list(self._copied_numbers(model))
        switching = (m for m in model.modules() if isinstance(m, nn.Dropout) or _is_adapted(m))
        self._switches = [
            (values, key)
            for values in map(vars, dict.fromkeys((*running, *switching)))
            for key, value in values.items()
            if key not in _OF_EVERY_MODULE and _is_plain(value)
        ]
        self._sizes = list(self._count())

    def _copied_numbers(self, model: Any) -> Iterator[Entry]:
        yield from _numbers("config", vars(model.config), (float,))
        of_adapters = {
            id(part) for _, module in self._modules if hasattr(module, "base_layer") for part in module.modules()
        }
        for name, module in self._modules:
            if id(module) not in of_adapters:  # whose state operators read
                yield from _numbers(name, vars(module), (int, float))

    def _count(self) -> Iterator[int]:
        return (len(module._modules) + len(module._parameters) for _, module in self._modules)

    def count_hooks(self) -> list[int]:
        """Returns the number of hooks and of replaced forwards of every module."""
        return [
            len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in vars(module))
            for _, module in self._modules
        ]

    def switches(self) -> list[object]:
        """Returns the numbers, texts and lists of the submodules that operators read in every window: modes, factors,
        probabilities of dropout, active adapters; and the addresses of buffers."""
        addresses = (getattr(values.get(key), "data_ptr", int)() for values, key in self._buffers)
        return [*(values.get(key) for values, key in self._switches), *addresses]

    def _marks(self) -> list[object]:
        """Returns what changes with each write to a buffer, and with each replacement."""
        return [mark(values.get(key)) for values, key in self._buffers]

    @property
    def has_buffers(self) -> bool:
        """Whether operators read buffers. Equal on all ranks."""
        return bool(self._buffers)

    def have_buffers_changed(self) -> bool:
        """Returns whether this rank's buffers may have got other values since the last call."""
        before, self._seen = self._seen, self._marks()
        return self._seen != before

    def change_of_structure(self) -> str:
        """Returns a sentence about a replaced, removed or added module or tensor; empty without a change."""
        for name, values, key, value in self._structure:
            now = values.get(key)
            if now is value:
                continue
            if isinstance(value, nn.Module | nn.Parameter) or not isinstance(now, Tensor):
                return f"{_joined(name, key)} was replaced or removed"
            if now.shape != value.shape:
                return f"{_joined(name, key)} has got another shape"
        for name, parameter, form in self._forms:
            if _form(parameter) != form:
                return f"{name} has got another shape"
        for (name, _), was, now in zip(self._modules, self._sizes, self._count(), strict=True):
            if was != now:
                return f"{name or 'the model'} has got a module or parameter"
        return ""

    def check_trainable(self) -> None:
        """Refuses to train merged adapters.

        Raises:
            ValueError: names the module.
        """
        for name, module in self._adapted:
            if module.merged_adapters:
                raise ValueError(f"{name} has merged its adapters, which are not trained then; call unmerge_adapter()")

    def check(self, with_types: bool) -> None:
        """Refuses a changed model; with types also changed types of parameters, as buffers between ranks have the type.

        Raises:
            ValueError: names the module and its change.
        """
        change = self.change_of_structure()
        for name, parameter, dtype in self._types if with_types else ():
            if parameter.dtype != dtype:
                change = f"{name} was {dtype} and is {parameter.dtype}"
        for name, values, key, value in self._numbers:
            now = values.get(key)
            if now is not value and now != value:
                change = f"{_joined(name, key)} was {value} and is {now}"
        if change:
            raise ValueError(
                f"{change} since the model was cut, which training would not follow; change it before HelixTrainer or "
                "HelixPlugin.prepare is given the model, or save the model and go on with from_pretrained(folder)"
            )


def mark(buffer: Tensor | None) -> tuple[int, int | None]:
    """Returns what changes with each write to a buffer, and with each replacement."""
    return id(buffer), None if buffer is None or buffer.is_inference() else buffer._version


_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


def _is_adapted(module: nn.Module) -> bool:
    """Whether a module is PEFT's layer of adapters, or a wrapper of copies."""
    return hasattr(module, "merged_adapters") or hasattr(module, "modules_to_save")


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str)


def _joined(*names: str) -> str:
    return ".".join(filter(None, map(str, names)))


def _tensors_and_modules(model: nn.Module, runs: Collection[int]) -> Iterator[Entry]:
    for name, module in model.named_modules():
        buffers = {} if id(module) in runs else module._buffers  # ropes make theirs anew
        for values in (module._parameters, buffers, module._modules):
            for key, value in values.items():
                if not isinstance(value, nn.Module) or _holds(value):
                    yield name, values, key, value


def _form(parameter: nn.Parameter) -> Any:
    """The shape of a parameter, or its division over the ranks; a new shape removes the division."""
    return vars(parameter).get("_division", parameter.shape)


def _numbers(name: str, values: dict[str, Any], kinds: tuple[type, ...]) -> Iterator[Entry]:
    for key, value in values.items():
        if type(value) in kinds and not str(key).startswith("_"):
            yield name, values, key, value


def _holds(module: nn.Module) -> bool:
    """Whether a module holds parameters; modules without parameters, such as activations, may be replaced."""
    return any(True for _ in module.parameters())
