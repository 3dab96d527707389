"""What torch runs below autograd, seen from outside."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Lists the operators that are called, or some of them alone."""

    def __init__(self, *only: str) -> None:
        super().__init__()
        self.only, self.names = only, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in self.only or not self.only:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """The most elements of a new tensor, of one type if it is given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.dtype == (self.dtype or value.dtype):
                is_new = all(value is not each for each in args)
                self.elements = max(self.elements, value.numel() if is_new else 0)
        return result
