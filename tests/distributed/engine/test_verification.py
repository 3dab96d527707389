"""Silent corruption: one changed bit of a gradient is found and named; without one there is no alarm."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.jobs import make_trainer
from support.marks import slow
from support.models import sequences
from support.tuning_jobs import hasty
from torch import nn

from hf_helix.engine.verification import Digests, digest

Helix = dict[str, Any]
MODEL = {"num_hidden_layers": 4}


def flip_bits(folder: str, helix: Helix, count: int) -> list[tuple[str, str]]:
    """Flips a random bit in each of so many windows, on a random rank, the first or the second time that it runs; what
    this rank is told, and the parameter on the rank."""
    with hasty():
        trainer: Any = make_trainer(folder, {**helix, "verify_every": 1}, model=MODEL)
        batches = [{name: value[None] for name, value in row.items()} for row in sequences(4)]
        result = []
        for number in range(count):
            draw = random.Random(number)
            victim = draw.randrange(dist.get_world_size())
            with flipped(draw, victim == dist.get_rank()) as names:
                try:
                    trainer.helix.session.train_window(batches, trainer.loss_scale(torch.tensor(4.0)), number)
                    said = ""
                except RuntimeError as error:
                    said = str(error)
            place = [f"rank {victim}: {_name_of(trainer.model, names[0])}"] if names else [""]
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, place[0])
            result.append((said, "".join(told)))
    return result


def _name_of(model: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, each in model.named_parameters() if each is parameter)


@contextlib.contextmanager
def flipped(draw: random.Random, is_victim: bool) -> Iterator[list[nn.Parameter]]:
    """Flips a bit of one gradient before its digest is made, the first or the second time that the window runs."""
    add, run, place = Digests.add, draw.randrange(2), draw.randrange(10)
    changed: list[nn.Parameter] = []
    seen: dict[Digests, int] = {}

    def adding(self: Digests, parameter: nn.Parameter) -> None:
        if is_victim and not changed and parameter.grad is not None:
            seen[self] = seen.get(self, -1) + 1
            if list(seen).index(self) == run and seen[self] == place:
                bits = parameter.grad.view(-1).view(torch.int32)
                bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(31)
                changed.append(parameter)
        add(self, parameter)

    with mock.patch.object(Digests, "add", adding):
        yield changed


def train_verified(folder: str, helix: Helix, steps: int, every: int) -> list[tuple[float, float]]:
    with hasty():
        training = {"max_steps": steps, "gradient_accumulation_steps": 2, "logging_steps": 1}
        trainer: Any = make_trainer(folder, {**helix, "verify_every": every}, model=MODEL, training=training)
        trainer.train()
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]


LAYOUTS: list[Helix] = [
    {"tp_size": 2, "plan": "greedy"},
    {"shard_parameters": True, "plan": "sequential"},
    {"shard_parameters": True, "plan": "greedy", "reduce_gradients": "microbatch"},
    {"shard_optimizer": True, "plan": "greedy"},
    {"plan": "sequential"},
    {"pp_size": 2, "plan": "greedy"},
]


@pytest.mark.parametrize(("helix", "count"), [(LAYOUTS[0], 3), *(slow(helix, 50) for helix in LAYOUTS)], ids=str)
def test_a_flipped_bit_is_found(helix: Helix, count: int, cluster_of: Any, tmp_path: Path) -> None:
    """Every rank raises the same error, which names the rank and the parameter."""
    results = cluster_of(2).run(flip_bits, folder=str(tmp_path), helix=helix, count=count)
    assert results[0] == results[1]
    for number, (said, place) in enumerate(results[0]):
        assert place, f"no bit was flipped in window {number}"
        assert f"step {number + 1}: verify_every has computed gradients twice" in said
        assert f"not the same bits on {place}. A core" in said


@pytest.mark.parametrize(("helix", "steps"), [(LAYOUTS[0], 3), *(slow(helix, 125) for helix in LAYOUTS[:4])], ids=str)
def test_no_alarm_without_corruption(helix: Helix, steps: int, cluster_of: Any, tmp_path: Path) -> None:
    """And the same losses and norms, to the last digit, as without the option."""
    job = {"folder": str(tmp_path), "helix": helix, "steps": steps}
    assert cluster_of(2).run(train_verified, every=1, **job) == cluster_of(2).run(train_verified, every=0, **job)


def test_one_bit_changes_the_digest() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        value = torch.randn(1000).to(dtype)
        before = digest(value)
        assert digest(value.clone()) == before
        bits = value.view(torch.int32 if dtype is torch.float32 else torch.int16)
        for place in (0, 1, 999):
            for bit in range(8 * value.itemsize - 1):
                bits[place] ^= 1 << bit
                assert digest(value) != before
                bits[place] ^= 1 << bit


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"verify_every": -1}, "verify_every=-1 is no number of windows; use 0 for never, or 100"),
        ({"verify_every": 10, "cuda_graphs": True}, "verify_every=10 with cuda_graphs=True.*use cuda_graphs=False"),
    ],
)
def test_refusals(given: dict[str, Any], words: str) -> None:
    from hf_helix import HelixConfig

    with pytest.raises(ValueError, match=words):
        HelixConfig(**given)
