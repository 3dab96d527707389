"""Operators on the meta device, made again from shapes that are known, against torch."""

from typing import Any

import pytest
import torch
from support.dispatched import Calls

from hf_helix.doctor.amounts import meter
from hf_helix.doctor.amounts.meter import made_on_meta, tensors_in

aten = torch.ops.aten


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


MAKES = {
    "product": (aten.mm.default, lambda: (meta(3, 4), meta(4, 5)), {}),
    "transposed": (aten.clone.default, lambda: (meta(3, 4).t(),), {}),
    "expanded": (aten.mul.Tensor, lambda: (meta(3, 1).expand(3, 4), meta(3, 4)), {}),
    "whole numbers": (aten.add.Tensor, lambda: (meta(3, dtype=torch.int64), 1), {}),
    "mixed": (aten.add.Tensor, lambda: (meta(3, dtype=torch.int64), 1.0), {}),
    "cast": (aten._to_copy.default, lambda: (meta(3, 4),), {"dtype": torch.bfloat16}),
    "parts": (aten.unbind_copy.int, lambda: (meta(3, 4),), {}),
    "several": (aten.max.dim, lambda: (meta(3, 4), 1), {}),
    "list": (aten.cat.default, lambda: ([meta(3, 4), meta(2, 4)],), {}),
    "some are none": (
        aten.native_layer_norm_backward.default,
        lambda: (meta(2, 4), meta(2, 4), [4], meta(2, 1), meta(2, 1), meta(4), meta(4), [True, True, False]),
        {},
    ),
}


def described(result: Any) -> list[Any]:
    results = result if isinstance(result, tuple | list) else [result]
    return [
        None if each is None else (each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes())
        for each in results
    ]


def made(function: Any, args: Any, kwargs: Any) -> Any:
    return made_on_meta(function, args, kwargs, tensors_in((args, kwargs)))[0]


@pytest.mark.parametrize("name", MAKES)
def test_what_is_made_again_is_as_torch_makes_it(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meter, "_made", {})
    function, args, kwargs = MAKES[name]
    expected = described(function(*args(), **kwargs))
    made(function, args(), kwargs)
    arguments = args()
    with Calls() as calls:
        again = made(function, arguments, kwargs)
    assert set(calls.names) <= {"empty_strided"}, "it was known"
    assert described(again) == expected
    assert type(again) is type(function(*args(), **kwargs))


def test_a_kernel_reads_the_storage_of_an_expanded_argument(monkeypatch: pytest.MonkeyPatch):
    """Its shape and strides do not tell how large the storage is."""
    monkeypatch.setattr(meter, "_made", {})
    own, other = meta(1, 4).expand(3, 4), meta(8, 4)[:1].expand(3, 4)
    for values, read in ((own, 4 * 4), (other, 3 * 4 * 4)) * 2:
        _, _, kernel = made_on_meta(aten.neg.default, (values,), {}, [values])
        assert kernel is not None
        assert kernel.bytes == read + 3 * 4 * 4


def test_the_type_that_is_made_by_default_is_that_of_now():
    args = meta(3, dtype=torch.int64), meta(3, dtype=torch.int64)
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        assert made(aten.div.Tensor, args, {}).dtype is dtype
    # A product that torch cannot run on meta returns what it adds to.
    total, left, right = meta(2, 3, 5), meta(2, 3, 4, dtype=torch.bfloat16), meta(2, 4, 5, dtype=torch.bfloat16)
    result = made(aten.baddbmm.dtype_out, (total, left, right, torch.float32), {"out": total})
    assert result is total


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten._unsafe_view.default, lambda: (meta(3, 4), [12])),  # its declaration does not say that it is a view
        (aten.t.default, lambda: (meta(3, 4),)),
        (aten.mul.Tensor, lambda: (meta(3), torch.ones(()))),  # a value that may decide
        (aten.add_.Tensor, lambda: (meta(3, 4), meta(3, 4))),
        (aten.addmm_.default, lambda: (meta(3, 5), meta(3, 4), meta(4, 5))),
        (aten.t_.default, lambda: (meta(3, 4),)),  # writes to the shape
    ],
)
def test_views_and_what_values_decide_and_what_writes_in_place_always_run(function: Any, args: Any):
    expected = described(function(*args()))
    made(function, args(), {})
    arguments = args()
    with Calls() as calls:
        result = made(function, arguments, {})
    assert [name for name in calls.names if name != "empty_strided"]
    assert described(result) == expected
    if function.name().partition(".")[0].endswith("_"):
        assert result is arguments[0]
    elif arguments[0].dim() == 2:
        assert result.untyped_storage()._cdata == arguments[0].untyped_storage()._cdata
