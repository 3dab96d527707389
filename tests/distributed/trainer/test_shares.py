"""A script that gives each process its own share of prompts or rows gets the answers of the uncut model, in order.

The oracle is a whole model on every process, as under DDP.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from support.comparisons import is_close, plain
from support.jobs import build
from support.marks import slow
from support.models import VOCABULARY, sequences, tiny
from torch.nn import functional

from hf_helix.runtime.distributed.mesh import rank

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}


def prompts(count: int, of_one_length: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = [6 if of_one_length else 3 + 2 * number for number in range(count)]
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def share(count: int, of_one_length: bool = False) -> Iterator[Any]:
    with PartialState().split_between_processes(prompts(count, of_one_length)) as mine:
        yield from mine


def together(model: Any) -> Any:
    """One call for the whole share."""
    ids = torch.stack([*share(6, of_one_length=True)])
    return gather_object(model.generate(ids, **OPTIONS).tolist())


def one_by_one(model: Any) -> Any:
    """Of several lengths, a call for each; one rank has a call more, of another length."""
    found = [model.generate(input_ids=ids[None], **OPTIONS, synced_gpus=False).tolist() for ids in share(7)]
    return gather_object(found)


def empty(model: Any) -> Any:
    """Only rank 0 has a prompt."""
    return gather_object([model.generate(ids[None], **OPTIONS).tolist() for ids in share(1)])


def losses(model: Any) -> Any:
    with torch.no_grad():
        return gather_object([model(ids[None], labels=ids[None]).loss.item() for ids in share(5)])


def cached(model: Any) -> Any:
    """A loop of the script's own, with a cache."""
    found = []
    for ids in share(4):
        cache, row = None, ids[None]
        with torch.inference_mode():
            for _ in range(3):
                outputs = model(row[:, -1:] if cache else row, past_key_values=cache, use_cache=True)
                cache = outputs.past_key_values
                row = torch.cat((row, outputs.logits[:, -1:].argmax(-1)), -1)
        found.append(row.tolist())
    return gather_object(found)


def rank_0(model: Any) -> Any:
    found = model.generate(prompts(1)[0][None], **OPTIONS).tolist() if rank() == 0 else None
    if dist.is_initialized():
        dist.barrier()
    return gather_object([found])[0]


def alike_but_one(model: Any) -> Any:
    """Rank 0 has another prompt than all the others, which are alike."""
    first, other = prompts(2)
    return gather_object(model.generate((first if rank() == 0 else other)[None], **OPTIONS).tolist())


def scaled(model: Any) -> Any:
    """Weights that are scaled for calls of rank 0 only, and scaled back at once on the others."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        found = [model(ids[None]).logits.square().sum().item() for ids in prompts(2)] if rank() == 0 else []
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return gather_object([found])[0]


def configured(model: Any) -> Any:
    """Each rank has its own defaults."""
    model.generation_config.max_new_tokens = 2 + rank()
    return gather_object(model.generate(prompts(2)[1][None], pad_token_id=0, do_sample=False).tolist())


_USES = (together, one_by_one, empty, losses, cached, rank_0, alike_but_one, scaled, configured)
USES = {each.__name__: each for each in _USES}


def weighted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(logits, labels[:, 1:].flatten()) * 1.5


def run(folder: str, helix: dict[str, Any], own_loss: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the cut model answers, and the whole model."""
    loss = {"compute_loss_func": weighted} if own_loss else {}
    whole = tiny(num_hidden_layers=4).eval()
    data = {"model": tiny(num_hidden_layers=4), "train_dataset": sequences(8)}
    trainer = build(folder, {"plan": "greedy", **helix}, **data, **loss)
    cut = trainer.model.eval()
    found, expected = ({name: use(model) for name, use in USES.items()} for model in (cut, whole))
    trainer.helix.close()
    return plain(found), plain(expected)


def refuse(folder: str) -> None:
    """Calls that differ, with a function that other ranks cannot get."""
    model = build(folder, {"tp_size": 2}, model=tiny(num_hidden_layers=2), train_dataset=sequences(4)).model
    equal = {**OPTIONS, "prefix_allowed_tokens_fn": lambda batch, ids: [1, 2, 3]}
    assert model.generate(prompts(1)[0][None], **equal).max() <= VOCABULARY
    model.generate(prompts(2)[rank()][None], **equal)


TP, PP, CP, SHARDS = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}, {"shard_parameters": True}


@pytest.mark.parametrize(
    ("ranks", "helix", "own_loss"),
    [
        (2, TP, False),
        slow(2, PP, False),
        slow(2, CP, False),
        slow(2, SHARDS, False),
        slow(2, {"shard_optimizer": True}, False),
        slow(2, TP, True),
        slow(2, PP, True),
        slow(2, SHARDS, True),
        slow(4, TP, False),
        slow(4, {**TP, **SHARDS}, True),
    ],
    ids=str,
)
def test_shares_of_processes(
    ranks: int, helix: dict[str, Any], own_loss: bool, cluster_of: Any, tmp_path: Path
) -> None:
    for found, expected in cluster_of(ranks).run(run, folder=str(tmp_path), helix=helix, own_loss=own_loss):
        wrong = {name: (found[name], each) for name, each in expected.items() if not is_close(found[name], each)}
        assert not wrong


def test_a_function_that_stays_on_its_rank(cluster_of: Any, tmp_path: Path) -> None:
    words = "rank 0 calls the model (generate) with other arguments than", "prefix_allowed_tokens_fn cannot be handed"
    cluster_of(2).assert_raises(refuse, *words, "give every rank the same arguments", alike=True, folder=str(tmp_path))
