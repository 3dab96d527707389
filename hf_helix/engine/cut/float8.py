"""Linears in fp8 (`HelixConfig.float8`): which of a model, on which devices, and a line about both.

In:   the declared units of a model, and a recipe.
Out:  the same units, whose linears multiply in fp8, and whose all-gathers before these linears carry fp8.
Must hold: the head, routers, the products of experts, weights in 4 bits and linears with adapters stay in the type of
the run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hf_helix.operators.communication.collectives import AllGather
from hf_helix.operators.experts.grouped_linear import GroupedLinear
from hf_helix.operators.linears.linear import Linear
from hf_helix.operators.units.unit import Unit
from hf_helix.operators.vocabulary.head import Deferred

LEAST_CAPABILITY = (8, 9)
"""The oldest compute capability with products in fp8: Ada (L40S, RTX 4090)."""


def use_float8(units: Iterable[Unit], recipe: str | None, head: Tensor | None) -> None:
    """Sets the recipe of all linears but the head and routers; of all-gathers that only such linears read.

    Args:
        units: changed in place.
        recipe: see `HelixConfig.float8`; None for products in the type of the run.
        head: the weight of the head, if there is one.
    """
    for unit in units:
        experts = {meter.num_experts for meter in unit.meters}
        for op in unit.graphs.forward.operators:
            operator = unit.operators[op.forward_name]
            if isinstance(operator, Linear):
                # Of a router, the output features are the experts.
                stays = any(each.weight is head or each.weight.shape[0] in experts for each in operator.linears)
                operator.float8 = None if stays else recipe
            elif isinstance(operator, AllGather):
                operator.in_float8 = _all_in_float8(_readers(unit, op.writes[0]))


def _readers(unit: Unit, value: str) -> list[Linear]:
    """The linears that read a value; none if anything else does."""
    graph = unit.graphs.forward
    readers = [unit.operators[op.forward_name] for op in graph.operators if value in op.depends_on]
    linears = [reader for reader in readers if isinstance(reader, Linear)]
    is_read_elsewhere = len(linears) < len(readers) or value in (*graph.outputs, *graph.shown)
    return [] if is_read_elsewhere else linears


def _all_in_float8(linears: Sequence[Linear]) -> Callable[[], bool] | None:
    """Returns a function for the shapes of weights once they are cut."""
    if not linears:
        return None
    return lambda: all(linear.float8 and not any(linear.reasons_against_float8()) for linear in linears)


def check_float8(recipe: str | None, device: torch.device) -> None:
    """Refuses devices without products in fp8, if a recipe asks for them.

    Raises:
        ValueError: names the device, and the devices that work.
    """
    if recipe is None or device.type != "cuda":
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < LEAST_CAPABILITY:
        raise ValueError(
            f"float8={recipe!r} on {name} (compute capability {'.'.join(map(str, capability))}): products in fp8 need "
            "an NVIDIA GPU of compute capability 8.9 or more, such as an L40S, RTX 4090, H100 or B200; use float8=None"
        )


def describe_float8(units: Iterable[Unit], recipe: str, device: torch.device) -> str:
    """Returns which linears of a rank multiply in fp8, and why others do not, in one sentence.

    Args:
        units: of the rank, cut.
        recipe: of `use_float8`.
        device: of the run.

    Raises:
        ValueError: no linear multiplies in fp8.
    """
    in_float8, others = 0, Counter[str]()
    for unit in units:
        for operator in unit.operators.values():
            operator = operator.operator if isinstance(operator, Deferred) else operator
            if isinstance(operator, GroupedLinear):
                others["experts"] += 1
            if isinstance(operator, Linear):
                for reason in operator.reasons_against_float8():
                    reason = "the head or a router" if operator.float8 is None else reason
                    in_float8, others = in_float8 + (not reason), others + Counter([reason] if reason else [])
    rest = "; ".join(f"{count} ({reason})" for reason, count in others.items())
    if not in_float8:
        raise ValueError(f"float8={recipe!r}: no linear of the model can multiply in fp8: {rest}; use float8=None")
    emulated = "; emulated on this CPU: values are rounded as in fp8, and nothing is faster" * (device.type == "cpu")
    return (
        f"float8={recipe}: {in_float8} linears of this rank multiply in fp8, their weight gradients in 16 bits or more"
        f"{'; not in fp8: ' * bool(rest)}{rest}{emulated}"
    )
