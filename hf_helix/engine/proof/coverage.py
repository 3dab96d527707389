"""Coverage of a proof: the kinds of parts of a model that its small model also has.

In:   a model, which may be on the meta device, and a small model of its class.
Out:  the names of the parts of the model that the small model lacks.
Must hold: parts are compared by name and class, without the numbers of layers; sizes do not count.
"""

import re
from collections.abc import Collection

from torch import nn

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def parts_of(model: nn.Module) -> frozenset[tuple[str, str]]:
    """Returns the names of modules, parameters and buffers, numbers of layers left out, each with its class."""
    modules = ((name, type(module).__name__) for name, module in model.named_modules())
    parameters = ((name, "parameter") for name, _ in model.named_parameters())
    buffers = ((name, "buffer") for name, _ in model.named_buffers())
    return frozenset((NUMBER.sub("N", name), kind) for name, kind in (*modules, *parameters, *buffers) if name)


def lacking(parts: Collection[tuple[str, str]], small: nn.Module) -> tuple[str, ...]:
    """Returns the names of parts that a small model lacks; parts of a module that it lacks are left out."""
    missing = dict(sorted(set(parts) - parts_of(small)))
    return tuple(name for name in missing if not any(name.startswith(f"{other}.") for other in missing))
