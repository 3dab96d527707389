"""Which arguments of a call reach the code of a decoder."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_helix.models.direct_use import leave_out_unread


def attend(module: nn.Module, **kwargs: Any) -> Any:
    return kwargs.get("tree_mask")


def helper(**kwargs: Any) -> Any:
    return kwargs.get("of_helper")


class Decoder(nn.Module):
    """Hands arguments on to functions by any name."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="attention_of_trees")

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        def inner() -> Any:
            return kwargs.get("of_inner")

        helper(**kwargs)
        return {**kwargs, "inner": inner()}


@pytest.mark.parametrize("name", ["of_inner", "of_helper", "tree_mask", "output_attentions"])
def test_an_argument_that_any_code_reads_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "attention_of_trees", attend)
    decoder = Decoder()
    leave_out_unread(decoder)
    assert decoder(1, **{name: 2, "column": 3})[name] == 2


def test_arguments_that_no_code_reads_are_left_out() -> None:
    decoder = Decoder()
    leave_out_unread(decoder)
    assert decoder(1, column=3, tree_mask=4).keys() == {"inner"}
