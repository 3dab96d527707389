"""Divided parameters: to a script, a parameter that ranks divide looks like the full parameter.

In:   the parameters of a cut model (tensor, expert and pipeline parallelism, `shard_optimizer`, `shard_parameters`),
      each with the positions of this rank's elements in the full parameter.
Out:  the same objects; to readers and writers, shape, gradient and values are the full parameter's.
Must hold: within `plain_parameters` they are ordinary parameters with this rank's elements, so that operators,
optimizers and checkpoints read plain tensors at no cost. Element-wise functions and writes communicate nothing. Norms
and sums communicate a number; all other functions gather the full tensor, and every rank must call them together, which
is checked.

The two views, and the switches between them:

    full      a script: its model, its callbacks, its own loss, its optimizer before the engine's `step_shards`
    entered   by the engine, in its methods that read or write parameters; by its hooks around an optimizer's step; by
              the hooks of `integrations` that let Transformers or Accelerate move, write or step parameters; by
              `Runner` and `DeferredBackward`, which also run without an engine
    plain     operators, executor, measurements, tuning, checkpoints; full weights that `unsharded` gathers

`__torch_function__` lets a subclass decide how a function runs. Torch itself tells which functions are element-wise and
which return views: by the tags of its operators, and by a trial on the meta device.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.operators.parameters.host_shard import arrived
from hf_helix.operators.torch_functions import UNTAGGED, is_elementwise, is_in_place, map_tensors
from hf_helix.planning.parameters import Part
from hf_helix.runtime.distributed import agreement
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.division import Division
from hf_helix.runtime.failures.heartbeat import watched
from hf_helix.runtime.rank_units import RankUnits


class DividedTensor(Tensor):
    """A tensor divided over ranks, or a view of it: to a script, the full tensor.

    Its own memory holds this rank's elements. A view holds no elements: it is a path from the full tensor, which is
    gathered for a read of the view, and written back after a write to the view.
    """

    _division: Any  # a `Division`; None once a parameter has got another shape, and every rank all of it
    _path: tuple[Callable[[Any], Any], ...] = ()
    _parameter: Any  # of a view, the divided tensor that the path begins at
    _alias_of: Any = None  # the parameter whose values it shows, if a script has read it from one

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        has_gradients = torch.is_grad_enabled()
        if (result := _call_code(func, args, kwargs or {}, has_gradients)) is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return _call(func, args, kwargs or {}, has_gradients)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        return memo[id(self)]

    def _copied(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            copy = _full(self).clone() if self._path else _divided(_held(self).clone(), self._division)
            if isinstance(self, DividedParameter):
                copy.__class__ = DividedParameter
                copy.requires_grad = self.requires_grad
            return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            full = _full(self)
            return (nn.Parameter(full) if isinstance(self, DividedParameter) else full).__reduce_ex__(protocol)


_GRADIENT: Any = torch.Tensor.grad
_TRAINED: Any = torch.Tensor.requires_grad


class DividedParameter(DividedTensor, nn.Parameter):
    """A parameter of a cut model, outside of `plain_parameters`.

    If ZeRO shards it, this rank's elements are in `_shard`. `_trained`, and if another pipeline rank holds it
    `_has_gradient`, describe the full parameter.
    """

    _shard: Tensor | None = None
    _trained = False
    _has_gradient = False
    _aliases: Any = ()  # tensors that scripts have read as `data`

    # The Trainer reads these in every step: they bypass `__torch_function__`.

    def numel(self) -> int:
        """Returns the number of elements of the full parameter."""
        return int(self._division.shape.numel())

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained, also if another pipeline rank holds it."""
        return self._trained

    @requires_grad.setter
    def requires_grad(self, new: bool) -> None:
        """Whether the parameter is trained, also if another pipeline rank holds it."""
        self._trained = bool(new)
        if self._division.is_here:
            with torch._C.DisableTorchFunctionSubclass():
                _TRAINED.__set__(self, new)

    @property
    def grad(self) -> Any:
        """The full gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            held = _held(self)
            gradient = _GRADIENT.__get__(held)
            arrived([gradient])
            if self._has_gradient and not self._division.is_here:
                gradient = held.new_empty(0)
            return None if gradient is None else _divided(gradient, self._division)

    @grad.setter
    def grad(self, new: Any) -> None:
        """The full gradient."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            held = _held(self)
            if new is not None and _outline(new).shape != self._division.shape:
                raise RuntimeError(
                    f"{self._division.name}.grad = a tensor of shape {list(_outline(new).shape)}: assign one of "
                    f"{list(self._division.shape)}, as the parameter has"
                )
            if new is not None and self._division.is_here:
                if _shares_memory(new, _GRADIENT.__get__(held)):
                    return
                new = _elements(new, self._division, held).to(held.dtype).detach()
            self._has_gradient = new is not None
            _GRADIENT.__set__(held, new if self._division.is_here else None)


class DividedParameters:
    """The divided parameters of a cut model. After this object is deleted, they keep their present class.

    Args:
        rank_units: the units of the model on this rank.
        mesh: the layout of the ranks.
    """

    def __init__(self, rank_units: RankUnits, mesh: Mesh) -> None:
        shards = rank_units.shards
        self._parameters: list[Any] = []
        self._summed: dict[nn.Parameter, int] = {}  # those that ranks hold in full, with the ranks of a sum
        for parameter, row in rank_units.model_rows.items():
            part = Part(row, mesh.place)
            if not (part.is_cut or row.flat is not None or mesh.pipe.size > 1):
                if part.num_summed > 1:
                    self._summed[parameter] = part.num_summed
                continue
            division, shard = Division(part, mesh), shards.get(parameter)
            parameter._shard = shard  # type: ignore[attr-defined]
            for each in (parameter,) if shard is None else (parameter, shard):
                each._division, each._trained = division, row.trained  # type: ignore[attr-defined]
                self._parameters.append(each)
        absent = [parameter for parameter in self._parameters if not parameter._division.is_here]
        self._absent = [parameter for parameter in absent if parameter._division.part.row.is_read]
        _live.add(self)
        self.show(not _depth)

    def show(self, full: bool) -> None:
        """Makes the parameters show the full parameters, or this rank's elements."""
        for parameter in self._parameters:
            parameter.__class__ = DividedParameter if full and parameter._division is not None else nn.Parameter

    def share_losses(self) -> None:
        """Allows losses to read parameters that ranks hold in full, and whose gradients are summed over ranks."""
        for parameter, count in self._summed.items():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(_share_of_loss, count=count))
                parameter.num_hooks_of_helix = 1  # type: ignore[attr-defined]  # see `check_forwards`

    def note_gradients(self) -> None:
        """Says that a window has left gradients, also on other pipeline ranks."""
        for parameter in self._absent:
            parameter._has_gradient = parameter._trained


def _share_of_loss(gradient: Tensor, count: int) -> Tensor:
    """Returns this rank's share of the gradient that a loss gives a parameter; a window's gradients are shares."""
    return gradient if _depth else gradient / count


_written: set[int] = set()  # the parameters, by id, that a script has written since the last meeting of all ranks
_num_meetings = -1  # at that time


def _meet_before_write(value: DividedTensor) -> None:
    """Waits for all ranks before a script's write to a parameter: a rank may still call the model, with the values from
    before. Writes to several parameters in a row meet once. Collective."""
    global _num_meetings
    parameter = _parameter_of(value)
    if parameter is None or is_recording() or _full_values:
        return
    if id(parameter) in _written or _num_meetings != agreement.num_meetings:
        _written.clear()
        with watched():
            agree_on_action("a parameter is written")
        _num_meetings = agreement.num_meetings
    _written.add(id(parameter))


_live: weakref.WeakSet[DividedParameters] = weakref.WeakSet()
_depth = 0


@contextlib.contextmanager
def plain_parameters() -> Iterator[None]:
    """Returns the context in which parameters are ordinary parameters with this rank's elements. Also decorates
    functions."""
    global _depth
    _depth += 1
    if _depth == 1:
        _show(full=False)
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _show(full=True)


@contextlib.contextmanager
def full_parameters() -> Iterator[None]:
    """Returns the context in which parameters are as scripts see them, also inside of `plain_parameters` and of a
    function of a divided parameter."""
    global _depth
    before, _depth = _depth, 0
    if before:
        _show(full=True)
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        _depth = before
        if before:
            _show(full=False)


def _show(full: bool) -> None:
    for parameters in _live:
        parameters.show(full)


def full_of(value: Tensor) -> Tensor:
    """Returns the full tensor of a divided tensor, or the given ordinary tensor. Collective if divided."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return _full(value)


def start_full(value: Tensor, reader: int | None = None) -> Callable[[], Tensor]:
    """Starts to gather a parameter, see `Division.start_gather`. Collective if divided. The function that is returned
    gives the values of an ordinary tensor in the memory of the tensor itself."""
    with full_parameters(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if not isinstance(value, DividedTensor):
            held = value.detach()
            return lambda: held
        division: Division = value._division
        return division.start_gather(_held(value), reader)


def elements_of(value: Tensor) -> Tensor | None:
    """Returns this rank's elements of a divided tensor; None for other tensors, and for views."""
    if not isinstance(value, DividedTensor) or value._path:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return _held(value).detach().as_subclass(Tensor)


# -- code that callers run -----------------------------------------------------------------------------------------

_OPERANDS = {
    functional.linear: ("input", "weight", "bias"),
    functional.embedding: ("input", "weight"),
    torch.addmm: ("input", "mat1", "mat2"),
}
_ATTRIBUTES = ("__get__", "__set__", "__delete__")
_num_recording = 0
# Of each entered `running_model_code`: the full parameters read so far, by id.
_full_values: list[dict[int, Tensor]] = []


@contextlib.contextmanager
def running_model_code() -> Iterator[None]:
    """Returns the context in which code of a model runs, without gradients: linears and lookups run over this rank's
    part, and other parameters are gathered once. All ranks that share a parameter enter together."""
    _full_values.append(_full_values[-1] if _full_values else {})
    try:
        with torch.no_grad():
            yield
    finally:
        _full_values.pop()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Returns the context in which a loss is computed and its backward pass runs: functions of trained parameters are
    recorded, and give gradients."""
    global _num_recording
    _num_recording += 1
    try:
        yield
    finally:
        _num_recording -= 1


def is_recording() -> bool:
    """Returns whether `recording` is entered."""
    return _num_recording > 0


def is_running_model_code() -> bool:
    """Returns whether `running_model_code` is entered."""
    return bool(_full_values)


def _call_code(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_gradients: bool) -> Any:
    """Returns the result of a function of a model's code or a loss; `NotImplemented` for other uses of parameters."""
    if func in _OPERANDS:
        found = _with_part(func, args, kwargs, has_gradients)
        if found is not NotImplemented:
            return found
    if getattr(func, "__name__", "") in _ATTRIBUTES:
        return NotImplemented
    if _full_values:
        return _apply(func, args, kwargs, _gathered_once)
    if not has_gradients:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return _apply(func, args, kwargs, _recorded) if _gives_gradients(func, args, kwargs) else NotImplemented


def _gives_gradients(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function gives gradients to its operands, divided and ordinary, by a trial on the meta device."""
    name, operands = getattr(func, "__name__", ""), [*_tensors((args, kwargs))]
    if not any(each.requires_grad and (is_recording() or not isinstance(each, DividedTensor)) for each in operands):
        return False
    if name in _REFUSED or name == "requires_grad_":
        return False
    if is_in_place(name) or kwargs.get("out") is not None:
        written = next(_tensors(kwargs.get("out", operands)))
        if isinstance(written, DividedTensor) and not isinstance(written, DividedParameter):
            written.requires_grad = written.is_floating_point()  # its gradient cannot be given: see `_recorded`
        return not isinstance(written, DividedTensor)
    outline = lambda each: _outline(each).detach().to("meta").requires_grad_(each.requires_grad)  # noqa: E731
    try:
        result = _apply(func, args, kwargs, outline)
    except (RuntimeError, TypeError):
        return True  # it needs values
    return any(each.requires_grad for each in _tensors(result))


def _with_part(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_gradients: bool) -> Any:
    """Returns the result of a linear or a lookup, computed over the parts that ranks hold."""
    given = {**dict(zip(_OPERANDS[func], args, strict=False)), **kwargs}
    value, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if func is torch.addmm:  # as transformers' `Conv1D` calls it
        value, weight, bias = given["mat1"], given["mat2"], given["input"]
    if not isinstance(weight, DividedParameter) or isinstance(value, DividedTensor):
        return NotImplemented
    division = weight._division
    with torch._C.DisableTorchFunctionSubclass():
        if func is functional.embedding:
            return division.full_lookup(value, weight) if _full_values else NotImplemented
        if _full_values:
            return division.full_linear(value, weight, bias, features=int(func is torch.addmm))
        if not division.part.row.is_above or func is not functional.linear:
            return NotImplemented
        if not has_gradients:  # perhaps in a callback, on a single rank
            with watched():
                agree_on_action(f"{division.name} is used")
        return division.linear(value, weight, bias)


def _gathered_once(value: Tensor) -> Tensor:
    """The full tensor of a parameter, kept until `running_model_code` ends."""
    if not isinstance(value, DividedTensor):
        return value
    known, root = _full_values[-1], _root(value)
    with torch._C.DisableTorchFunctionSubclass():
        if id(root) not in known:
            known[id(root)] = value._division.full(root)
        return _along(known[id(root)], value._path)


def _root(value: Any) -> Any:
    """The divided tensor that a view is taken of; the tensor itself if no view."""
    return value._parameter if value._path else value


def _parameter_of(value: DividedTensor) -> Any:
    """The parameter whose values a tensor shows; None if it has values of its own."""
    return value if isinstance(value, DividedParameter) else value._alias_of


def _recorded(value: Tensor) -> Tensor:
    """The full tensor, under autograd if it is trained."""
    if not isinstance(value, DividedTensor):
        return value
    division, is_trained = value._division, value.requires_grad
    if not is_recording() or (division.refusal and not is_trained):  # collective over all ranks, which is checked
        with torch.no_grad():
            full = _full(value)
        return _OutsideOfSteps.apply(full.requires_grad_(), division.name) if is_trained else full
    if is_trained and not isinstance(_root(value), DividedParameter):
        raise RuntimeError(
            f"the loss reads a copy of {division.name} that gets gradients, by requires_grad_() or since values with "
            "gradients were written into it: use the function that returns a new tensor, such as copy * x in place of "
            "copy.mul_(x)"
        )
    if is_trained and division.refusal:
        raise RuntimeError(
            f"the loss reads the trained parameter {division.name}, but {division.refusal}: read it in the loss as "
            "parameter.detach(), or freeze it"
        )
    full = division.full(_root(value))  # without a graph on pipeline ranks without the parameter
    return _along(full.requires_grad_() if is_trained else full.detach(), value._path)


class _OutsideOfSteps(torch.autograd.Function):
    """A full parameter outside of a training step, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, name: str) -> Tensor:
        ctx.name = name
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f".backward() outside of a training step reaches the trained parameter {ctx.name}: read it as "
            "parameter.detach(), or compute the loss in compute_loss"
        )


# -- kinds of functions -------------------------------------------------------------------------------------------

_OF_FULL = {"shape", "ndim", "nbytes", "size", "dim", "ndimension", "numel", "nelement", "stride", "__len__"}
_OF_FULL |= {"is_contiguous", "storage_offset"}
_OF_HELD = {"element_size", "is_floating_point", "is_complex", "is_signed", "get_device", "is_inference"}
_OF_HELD |= {"_has_compatible_shallow_copy_type", "is_tensor", "is_neg", "is_conj"}
_VIEWS = {"T", "mT", "H", "mH", "real"}
_FOREACH = "_foreach_"  # begins the names of torch's functions over lists
_UNREAD = ("rand_like", "randn_like", "randint_like", "new_")
_REFUSED = {
    "register_hook": "change the gradient in a callback's on_pre_optimizer_step",
    "register_post_accumulate_grad_hook": "change the gradient in a callback's on_pre_optimizer_step",
    **dict.fromkeys(
        ("set_", "resize_", "resize_as_", "share_memory_", "storage", "untyped_storage", "data_ptr"),
        "read or write the values, as in parameter.data.copy_(values)",
    ),
    **dict.fromkeys(("t_", "transpose_", "squeeze_", "unsqueeze_"), "use the function that returns a view"),
}


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_gradients: bool) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__
        if name == "__get__":
            return _read_attribute(args[0], attribute, func, has_gradients)
        return _write_attribute(args[0], attribute, args[1] if name == "__set__" else None)
    is_collective = str(getattr(func, "__module__", "")).startswith("torch.distributed")
    if name in _REFUSED or is_collective:
        owner = next(each for each in _tensors((args, kwargs)) if isinstance(each, DividedTensor))
        raise RuntimeError(
            f"{name}() of {owner._division.name}: the ranks hold parts of this parameter, for which it does not work; "
            f"{_REFUSED.get(name, 'every rank sees the full parameter and the gradient of all ranks without it')}"
        )
    if name in _OF_FULL:
        return _apply(func, args, kwargs, _outline)
    if name in _OF_HELD or (name == "type" and len(args) == 1 and not kwargs):
        return _apply(func, args, kwargs, _held)
    if name in ("__repr__", "__format__"):  # debuggers call these on a single rank, so no values are gathered
        outline, kind = _outline(args[0]), type(args[0]).__name__
        return f"{kind}({args[0]._division.name}, {list(outline.shape)}, {outline.dtype}, divided over the ranks)"
    if name == "requires_grad_":
        args[0].requires_grad = kwargs.get("requires_grad", (*args[1:], True)[0])
        return args[0]
    if name.startswith(_FOREACH):
        return _foreach(func, name, args, kwargs, has_gradients)
    if is_in_place(name) or kwargs.get("out") is not None:
        return _write(func, name, args, kwargs, has_gradients)
    return _read(func, name, args, kwargs, has_gradients)


def _read_attribute(value: DividedTensor, attribute: str, get: Any, has_gradients: bool) -> Any:
    if attribute in _OF_FULL:
        return get(_outline(value))
    if attribute in _VIEWS:
        return _view(value, get, has_gradients)
    if attribute == "data":
        data = _viewed(value, False, Tensor.detach) if value._path else _divided(_held(value), value._division)
        data._alias_of = _parameter_of(value)
        if isinstance(value, DividedParameter):
            value._aliases = [*(each for each in value._aliases if each() is not None), weakref.ref(data)]
        return data
    return get(value)


def _write_attribute(value: DividedTensor, attribute: str, new: Any) -> None:
    held = _held(value)
    if attribute == "data" and not value._path:
        if not isinstance(new, DividedTensor) or new._path or _parameter_of(new) is not _parameter_of(value):
            _meet_before_write(value)
        if _outline(new).shape != value._division.shape:  # such as a resized table: every rank has the new values
            value.data, value._division = _full(new).detach(), None
            value.__class__ = nn.Parameter  # type: ignore[assignment]
            return
        elements = _elements(new, value._division, held)
        if held is not value and held.device != value._division.mesh.device:  # it stays on the host
            elements = elements.to(held.device)
        if elements.dtype is held.dtype and elements.device == held.device:
            if not _shares_memory(elements, held):
                _part_from_aliases(value, held)
                held.copy_(elements)
        elif held is value:
            value.data = elements
        else:
            raise ValueError(
                f"{value._division.name} is {held.dtype} on {held.device}, and {elements.dtype} on "
                f"{elements.device} is asked for: what ranks shard or hosts hold (shard_optimizer, shard_parameters, "
                "offload) cannot be converted; save the model, and convert it with from_pretrained(folder, dtype=...)"
            )
    else:
        setattr(value, attribute, new)


def _part_from_aliases(value: DividedTensor, held: Tensor) -> None:
    """Gives a script's references to `parameter.data` memory of their own, since the parameter gets other values."""
    aliases = [alias for each in getattr(value, "_aliases", ()) if _shares_memory(alias := each(), held)]
    own = held.detach().clone() if aliases else held
    for alias in aliases:
        alias.data = own
    value._aliases = ()  # type: ignore[attr-defined]


def _read(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_gradients: bool) -> Any:
    """Returns the result of a function that writes to none of its arguments."""
    first = next(each for each in _tensors((args, kwargs)) if isinstance(each, DividedTensor))
    if not first._path:
        if name.strip("_") in _SUMS and len(args) == 1 and not kwargs:
            return _sum(name.strip("_"), first)
        if name in _NORMS and (order := _order(args, kwargs)) is not None:
            return _norms([first], order)[0]
        if is_elementwise(name) and (name in UNTAGGED or _keeps_shape(func, args, kwargs, first)):
            with contextlib.suppress(_NotElementwise):
                return _run_elementwise(func, args, kwargs, first._division)
    if name.startswith(_UNREAD):
        like = lambda each: torch.empty_like(_outline(each), device=_held(each).device)  # noqa: E731
        return _apply(func, args, kwargs, like)
    if sum(isinstance(each, DividedTensor) for each in _tensors((args, kwargs))) == 1 and args and args[0] is first:
        view = _view(first, lambda full: func(full, *args[1:], **kwargs), has_gradients)
        if view is not None:
            return view
    return _apply(func, args, kwargs, _full)


def _write(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_gradients: bool) -> Any:
    """Runs a function that writes to its first argument, or to `out`.

        a list of tensors                 error
        an ordinary tensor is written     gather the divided arguments, and run
        a leaf with gradients             error, as of torch
        wait for all ranks, then, for a full parameter:
            element-wise                  on this rank's elements                    p.mul_(0.9)
            constants by an index         on this rank's elements                    p[3:5] = 0
        otherwise, and for a view:        gather, run on the full tensor or its      p.T.copy_(other)
                                          view, keep this rank's elements

    Returns:
        The written tensor, or whatever else the function returns; None for an assignment by an index.
    """
    written = kwargs.get("out", next(_tensors((args, kwargs))))
    if args and isinstance(args[0], (list, tuple)):
        raise RuntimeError(f"{name}() writes to a list of tensors that the ranks hold parts of; use foreach=False")
    if not isinstance(written, DividedTensor):
        _apply(func, args, kwargs, _full)
        return written
    records = has_gradients and not isinstance(func, FunctionType)  # functions of nn.init record nothing
    if records and isinstance(written, DividedParameter) and written.requires_grad:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    division, held = written._division, _held(written)
    _meet_before_write(written)
    if not written._path and "out" not in kwargs:
        if is_elementwise(name):
            with contextlib.suppress(_NotElementwise):
                _run_elementwise(func, args, kwargs, division)
                return written
        if name == "__setitem__" and not any(isinstance(each, DividedTensor) for each in _tensors(args[1:])):
            _set_items(written, args[1], args[2])
            return None
    full = division.gather(held)
    place = _along(full, written._path)
    with_place = lambda each: place if each is written else _full(each)  # noqa: E731
    result = _apply(func, args, kwargs, with_place)
    held.copy_(division.cut(full, held))
    return written if result is place else result


def _set_items(value: DividedTensor, index: Any, new: Any) -> None:
    """Does `full[index] = new`, without communication."""
    held, division = _held(value), value._division
    is_set = torch.zeros(division.shape, dtype=torch.bool, device=held.device)
    is_set[index] = True
    full = torch.zeros(division.shape, dtype=held.dtype, device=held.device)
    full[index] = new
    held.copy_(torch.where(division.cut(is_set, held), division.cut(full, held), held))


def _foreach(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_gradients: bool) -> Any:
    """Runs a function over lists of tensors, tensor by tensor."""
    lists = {key for key, given in [*enumerate(args), *kwargs.items()] if isinstance(given, (list, tuple))}
    values = [*args, *kwargs.values()][0] if 0 in lists or not args else args[1]
    order = _order(args, kwargs) if name == "_foreach_norm" else None
    if order is not None and all(isinstance(each, DividedTensor) and not each._path for each in values):
        return _norms(values, order)

    def single(*given: Any, **keywords: Any) -> Any:
        places = [[value] if key in lists else value for key, value in enumerate(given)]
        result = func(*places, **{key: [value] if key in lists else value for key, value in keywords.items()})
        return result[0] if result else given[0]

    results = []
    for place in range(len(values)):
        given = tuple(value[place] if key in lists else value for key, value in enumerate(args))
        keywords = {key: value[place] if key in lists else value for key, value in kwargs.items()}
        is_divided = any(isinstance(each, DividedTensor) for each in _tensors((given, keywords)))
        run = _call if is_divided else lambda function, values, named, _: function(*values, **named)
        single.__name__ = name.removeprefix(_FOREACH)
        results.append(run(single, given, keywords, has_gradients))
    return values if name.endswith("_") else results


# -- sums ---------------------------------------------------------------------------------------------------------

_SUMS = {"sum", "mean", "any", "all", "count_nonzero"}
_NORMS = {"norm", "linalg_vector_norm"}


def _sum(name: str, value: DividedTensor) -> Tensor:
    held, count = _held(value), value._division.shape.numel()
    if name in ("any", "all", "count_nonzero"):
        (total,) = _totals([value], [held.count_nonzero()])
        return {"any": total > 0, "all": total == count}.get(name, total.long())
    dtype = getattr(held.new_ones(1), name)().dtype
    (total,) = _totals([value], [held.double().sum() if held.is_floating_point() else held.sum()])
    return (total / count if name == "mean" else total).to(dtype)


def _totals(values: Sequence[DividedTensor], numbers: Iterable[Tensor]) -> list[Tensor]:
    """Returns the sums over all ranks of a number of this rank's elements of each tensor, as float64. A single
    collective."""
    division = values[0]._division
    counted = [number.double() * value._division.part.counts for value, number in zip(values, numbers, strict=True)]
    total = torch.stack(counted).to(division.mesh.device)
    division.sum(total)
    return [each.to(number.device) for each, number in zip(total, counted, strict=True)]


def _order(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The p of a norm over all elements; None if the arguments ask for another norm."""
    kwargs = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    order = next(iter(kwargs.values()), 2) if len(args) == 1 else args[1]
    is_plain = len(args) + len(kwargs) <= 2 and kwargs.keys() <= {"p", "ord"}
    order = 2 if order in ("fro", None) else order
    return float(order) if is_plain and isinstance(order, (int, float)) and 0 < order < torch.inf else None


def _norms(values: Sequence[Any], order: float) -> list[Tensor]:
    """Returns the norms of tensors; a single collective sums their parts over the ranks."""
    kinds = [torch.promote_types(_held(value).dtype, torch.float32) for value in values]
    parts = [
        torch.linalg.vector_norm(_held(value), order, dtype=kind) for value, kind in zip(values, kinds, strict=True)
    ]
    totals = _totals(values, [part.double() ** order for part in parts])
    return [total.pow(1 / order).to(_held(value).dtype) for total, value in zip(totals, values, strict=True)]


# -- element-wise functions ---------------------------------------------------------------------------------------


class _NotElementwise(Exception):
    """The result is no tensor of the same shape."""


def _keeps_shape(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: DividedTensor) -> bool:
    """Whether a function returns a tensor of the same shape: `max` is element-wise only with two tensors. All ranks
    must get the same answer, so the function sees full shapes."""
    outline = lambda each: _outline(each).to("meta")  # noqa: E731
    try:
        result = _apply(func, args, kwargs, outline)
    except (RuntimeError, TypeError):
        return False  # it needs values, such as `equal`
    return isinstance(result, Tensor) and result.shape == value._division.shape


def _run_elementwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], division: Division) -> Any:
    """Runs a function on this rank's elements; returns a divided tensor of the result, or the function's returned
    argument."""
    divided = [each for each in _tensors((args, kwargs)) if isinstance(each, DividedTensor)]
    held = _held(next(each for each in divided if each._division is division and not each._path))
    local = lambda each: _elements(each, division, held) if _outline(each).dim() else _full(each)  # noqa: E731
    result = _apply(func, args, kwargs, local)
    same = next((each for each in divided if _held(each) is result), None)
    if same is not None:
        return same
    made = _divided(result, division)
    if getattr(func, "__name__", "") in ("detach", "to"):  # `to("cpu:0")` copies what is on "cpu"
        made._alias_of = _parameter_of(divided[0])
    return made


def _elements(value: Tensor, division: Division, held: Tensor) -> Tensor:
    """This rank's elements of a divided tensor, or of a full tensor on every rank."""
    if isinstance(value, DividedTensor) and value._division is division and not value._path:
        return _held(value)
    full = _full(value).to(held.device)
    try:
        expanded = full.expand(division.shape)
    except RuntimeError as error:
        raise _NotElementwise from error
    return division.cut(expanded, held)


# -- tensors ------------------------------------------------------------------------------------------------------


def _held(value: Tensor) -> Tensor:
    """This rank's elements of a tensor."""
    shard = getattr(value, "_shard", None) if isinstance(value, DividedParameter) else None
    return value if shard is None else shard


def _shares_memory(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.data_ptr() == other.data_ptr() and one.numel() > 0


def _divided(held: Tensor, division: Division) -> DividedTensor:
    """The divided tensor with these elements on this rank, in the same memory."""
    tensor: DividedTensor = held.detach().as_subclass(DividedTensor)
    tensor._division = division
    return tensor


def _full(value: Tensor) -> Tensor:
    """The full tensor, gathered if divided."""
    if not isinstance(value, DividedTensor):
        return value
    return _along(value._division.gather(_held(value)), value._path)


def _outline(value: Tensor) -> Tensor:
    """A tensor on the meta device with the properties of the full tensor."""
    if not isinstance(value, DividedTensor):
        return value
    return _along(torch.empty(value._division.shape, dtype=_held(value).dtype, device="meta"), value._path)


def _along(full: Tensor, path: Iterable[Callable[[Any], Any]]) -> Tensor:
    for step in path:
        full = step(full)
    return full


def _view(value: DividedTensor, step: Callable[[Any], Any], has_gradients: bool) -> Any:
    """The view, or the views, that a function returns; None if it returns none. A view of a trained tensor is trained,
    if made with gradients."""
    try:
        outline = step(_outline(value))
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # it needs values, such as `item`
    is_trained = has_gradients and value.requires_grad
    if isinstance(outline, Tensor) and outline._is_view():
        return _viewed(value, is_trained, step)
    if isinstance(outline, (tuple, list)) and all(isinstance(each, Tensor) and each._is_view() for each in outline):
        return tuple(_viewed(value, is_trained, step, itemgetter(place)) for place in range(len(outline)))
    return None


def _viewed(value: DividedTensor, is_trained: bool, *steps: Callable[[Any], Any]) -> DividedTensor:
    view = _divided(_held(value), value._division)
    view._path = (*value._path, *steps)
    view._parameter, view._alias_of = getattr(value, "_parameter", value), _parameter_of(value)
    view.requires_grad = is_trained
    return view


def _apply(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor], Any]) -> Any:
    """Returns the result of a function with every tensor in its arguments changed."""
    return func(*map_tensors(args, change), **map_tensors(dict(kwargs), change))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
