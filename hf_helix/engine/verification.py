"""Silent corruption: the gradients of a window are computed a second time, in another order, and compared bit by bit.

In:   a window that has run, with digests of its gradients on this rank, before any sum over ranks.
Out:  nothing, or an error on every rank that names the ranks and parameters that differ.
Must hold: gradients are the same bits in every order of issue (on CUDA: with deterministic kernels), so a difference is
a wrong bit of a core, a memory or a link. One changed bit always changes a digest. The host reads the digests once.
"""

import torch
from torch import Tensor, nn

from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.rules.registry import baseline_plan, make_plan
from hf_helix.planning.text import shorten_list
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.agreement import all_gather_object
from hf_helix.runtime.runner import Runner

_CHUNK = 1 << 22  # elements
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Digests:
    """Digests of the gradients of a window, by parameter.

    Args:
        model: the cut model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._sums: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter) -> None:
        """Adds the gradient that a parameter has now."""
        if parameter.grad is not None:
            made = digest(parameter.grad)
            self._sums[parameter] = self._sums[parameter] + made if parameter in self._sums else made

    def complete(self) -> None:
        """Adds the gradients that no sum over ranks has noted, such as a pipeline stage's, after the window."""
        for parameter in self.model.parameters():
            if parameter not in self._sums:
                self.add(parameter)

    def differing(self, other: "Digests") -> list[nn.Parameter]:
        """Returns the parameters whose digests are not the same."""
        both = [parameter for parameter in self._sums if parameter in other._sums]
        pairs = [torch.stack((self._sums[parameter], other._sums[parameter])) for parameter in both]
        values = torch.stack(pairs).tolist() if pairs else []
        same = {parameter for parameter, (one, two) in zip(both, values, strict=True) if one == two}
        return [parameter for parameter in {**self._sums, **other._sums} if parameter not in same]


def digest(value: Tensor) -> Tensor:
    """Returns a number of the bits of a tensor, on its device: words times odd numbers, added up modulo 2 ** 64."""
    words = value.detach().contiguous().view(-1).view(_WORDS[value.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for begin in range(0, words.numel(), _CHUNK):
        part = words[begin : begin + _CHUNK]
        odd = torch.arange(2 * begin + 1, 2 * (begin + len(part)), 2, device=value.device)
        total += (part.to(torch.int64) * odd).sum()
    return total


def in_another_order(runner: Runner) -> Runner:
    """Returns a runner of the same window whose plan issues operators in another order, where there is one."""
    plan, layout = runner.plan, runner.rank_units.layout
    other: Plan = baseline_plan(layout, model=plan.model, mesh=plan.mesh)
    if plan.rule == other.rule:
        other = make_plan("greedy", rough_profile(layout), model=plan.model, mesh=plan.mesh)
    return runner.with_plan(other)


def raise_if_different(first: Digests, again: Digests, step: int) -> None:
    """Compares the digests of a window over all ranks. Collective.

    Args:
        first: of this rank.
        again: of the second time.
        step: of the window, counted from 1.

    Raises:
        RuntimeError: on every rank, names the ranks and parameters.
    """
    names = {parameter: name for name, parameter in first.model.named_parameters()}
    of_ranks = all_gather_object([names[parameter] for parameter in first.differing(again)])
    found = [f"rank {rank}: {shorten_list(mine, limit=3)}" for rank, mine in enumerate(of_ranks) if mine]
    if found:
        raise RuntimeError(
            f"step {step}: verify_every has computed gradients twice, and they are not the same bits on "
            f"{'; '.join(found)}. A core, a memory or a link of that rank has changed a value; nothing of this step is "
            "saved: resume from the last checkpoint on other hardware, or without verify_every if kernels of the "
            "model are not deterministic"
        )
