"""Equal arguments and batches have equal numbers, and everything that a model may read makes another one."""

import copy
import functools
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper

from hf_helix.runtime.distributed.contents import arguments_number, tensor_numbers, window_number

IDS = torch.arange(6).view(2, 3)


def cache_of(value: float) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.full((1, 1, 2, 2), value), torch.ones(1, 1, 2, 2), 0)
    return cache


def captures(value: Any) -> Any:
    return lambda batch, ids: value


ARGUMENTS: list[Any] = [
    [(IDS,), {}],
    [(IDS.flip(0),), {}],
    [(IDS[:, :2],), {}],
    [(), {"input_ids": IDS}],
    [(IDS,), {"max_new_tokens": 3}],
    [(IDS,), {"generation_config": GenerationConfig(max_new_tokens=3)}],
    [(IDS,), {"generation_config": GenerationConfig(max_new_tokens=4)}],
    [(IDS,), {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])}],
    [(IDS,), {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.7)])}],
    [(IDS,), {"past_key_values": cache_of(0.0)}],
    [(IDS,), {"past_key_values": cache_of(1.0)}],
    [(IDS,), {"prefix_allowed_tokens_fn": captures([1])}],
    [(IDS,), {"prefix_allowed_tokens_fn": captures([2])}],
    [(IDS,), {"prefix_allowed_tokens_fn": functools.partial(captures, [1])}],
    [(IDS,), {"prefix_allowed_tokens_fn": functools.partial(captures, [2])}],
]


def test_numbers_of_arguments() -> None:
    numbers = [arguments_number(each) for each in ARGUMENTS]
    assert len(set(numbers)) == len(ARGUMENTS)
    assert [arguments_number(copy.deepcopy(each)) for each in ARGUMENTS] == numbers


def test_numbers_of_batches() -> None:
    batches: list[Any] = [{"a": IDS, "b": [IDS, {"c": IDS}], "text": "x"}, {"a": IDS, "b": [IDS, {"c": IDS + 1}]}, IDS]
    numbers = {int(window_number([batch])) for batch in batches}
    assert len(numbers) == 3
    assert window_number([{**batches[0], "text": "y"}]) == window_number(batches[:1])
    assert window_number(batches) != window_number(batches[::-1])
    assert [*tensor_numbers(batches[0])] == ["a", "b[0]", "b[1].c"]
    assert [*tensor_numbers(IDS)] == ["the batch"]
