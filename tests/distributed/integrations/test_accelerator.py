"""What scripts call on an `Accelerator` does what it does around the unsplit model, or is refused by name."""

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support.accelerator_jobs import BATCHES, METHODS, by_loop, by_trainer, rows_of
from support.jobs import build
from support.loop_jobs import made, reset, said
from support.marks import slow
from support.models import llama, sequences
from support.paths import ROOT

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.integrations.accelerate.loop import REFUSED as OF_LOOP
from hf_helix.integrations.trainer.trainer import REFUSED as OF_TRAINER

# -- what the ranks run ------------------------------------------------------------------------------------------------


def refused_by_trainer(folder: str, helix: dict[str, Any]) -> dict[str, str]:
    trainer = build(folder, helix, model=llama(), train_dataset=sequences(8))
    accelerator: Any = trainer.accelerator
    reset()
    of_loop = Accelerator(cpu=True, parallelism_config=HelixPlugin(HelixConfig(**helix)))
    return {
        "no plugin": said(lambda: of_loop.prepare(llama(), rows_of(4))),
        "save_state": said(lambda: accelerator.save_state(folder)),
        "load_state": said(lambda: accelerator.load_state(folder)),
        "join_uneven_inputs": said(lambda: accelerator.join_uneven_inputs([trainer.model])),
        "a pickle": said(lambda: accelerator.save_model(trainer.model, folder, safe_serialization=False)),
    }


class Counting(Accelerator):
    """An Accelerator of a script's own class."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("of the script")


def places(helix: dict[str, Any]) -> tuple[int, ...]:
    """The ranks of the layout, by an Accelerator of a script's own class."""
    reset()
    accelerator: Any = Counting(cpu=True, parallelism_config=HelixPlugin(HelixConfig(**helix)))
    assert isinstance(accelerator, Counting)
    assert said(lambda: accelerator.print("a line")) == "of the script"
    names = ("tensor", "pipeline", "context", "data")
    return tuple(getattr(accelerator, f"{name}_parallel_rank") for name in names)


def told() -> list[str]:
    """What rank 0 prints when a script calls the methods that count processes, twice each."""
    accelerator, model, *_ = made(HelixPlugin(HelixConfig(tp_size=2, plan="sequential", cache=False)), 1, 4)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_helix.integrations.accelerate.accelerator.say", lines.append)
        for _ in range(2):
            accelerator.gather(torch.ones(1))
            accelerator.reduce(torch.ones(1), "mean")
            accelerator.reduce(torch.ones(1))
            assert accelerator.num_processes == 2
    model.engine.close()
    return lines


# -- the tests --------------------------------------------------------------------------------------------------------


def compare(mine: Any, wanted: Any, where: str) -> None:
    """Numbers to 1e-4, everything else as it is."""
    if isinstance(wanted, dict):
        assert mine.keys() == wanted.keys(), where
        for name, value in wanted.items():
            compare(mine[name], value, f"{where} {name}")
    elif isinstance(wanted, (list, tuple)):
        assert len(mine) == len(wanted), where
        for place, value in enumerate(wanted):
            compare(mine[place], value, f"{where} {place}")
    elif isinstance(wanted, float):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6, err_msg=where)
    else:
        assert mine == wanted, where


@pytest.fixture(scope="module")
def stock_on_two(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of both ranks under stock DDP, of each door once."""

    @functools.cache
    def run(door: Any) -> list[dict[str, Any]]:
        return cluster_of(2).run(door, folder=str(tmp_path_factory.mktemp("ddp")), helix=None)  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize("door", [by_trainer, by_loop])
@pytest.mark.parametrize(
    "helix",
    [{"tp_size": 2}, slow({"pp_size": 2}), slow({"cp_size": 2}), slow({}), slow({"shard_parameters": True})],
    ids=str,
)
def test_methods(
    door: Any, helix: dict[str, Any], cluster_of: Any, stock: Any, stock_on_two: Any, tmp_path: Any
) -> None:
    """Values of samples and of the model are those of the stock run on the data-parallel ranks; values of processes are
    those of stock DDP."""
    shares = math.prod(helix.get(f"{axis}_size", 1) for axis in ("tp", "pp", "cp")) > 1
    both, one = stock_on_two(door), stock(door)[0]
    for rank, found in enumerate(cluster_of(2).run(door, folder=str(tmp_path), helix=helix)):
        assert len(found) >= 20
        for name, value in found.items():
            wanted = one[name] if shares and METHODS[name][0] == BATCHES else both[rank][name]
            assert not str(wanted).startswith(("TypeError", "ValueError", "RuntimeError")), (name, wanted)
            compare(value, wanted, f"{name} on rank {rank}")


def test_every_method_is_in_the_table() -> None:
    page = (ROOT / "docs" / "accelerate.md").read_text()
    table = page[page.index("## Methods of the Accelerator") :].split("\n## ")[0]
    rows = {name for line in table.splitlines() for name in re.findall(r"`(\w+)[`(]", line.split(" | ")[0])}
    assert rows >= {name.partition("(")[0] for name in METHODS}
    assert rows >= {*OF_LOOP, *OF_TRAINER}


def test_refusals(cluster_of: Any, tmp_path: Any) -> None:
    for said_by in cluster_of(2).run(refused_by_trainer, folder=str(tmp_path), helix={"tp_size": 2}):
        assert (
            "accelerator.save_state does not go with a cut model: use TrainingArguments(save" in said_by["save_state"]
        )
        assert "use trainer.train(resume_from_checkpoint=...)" in said_by["load_state"]
        assert "every rank runs as many batches" in said_by["join_uneven_inputs"]
        assert "use safe_serialization=True" in said_by["a pickle"]
        assert "use plugin.prepare(accelerator, model, optimizer, ...)" in said_by["no plugin"]


def test_the_place_of_a_rank(cluster_of: Any) -> None:
    """Also with a class of the script's own, whose methods are called."""
    assert cluster_of(2).run(places, helix={"tp_size": 2}) == [(0, 0, 0, 0), (1, 0, 0, 0)]
    assert cluster_of(2).run(places, helix={"pp_size": 2}) == [(0, 0, 0, 0), (0, 1, 0, 0)]
    assert cluster_of(2).run(places, helix={"cp_size": 2}) == [(0, 0, 0, 0), (0, 0, 1, 0)]
    assert cluster_of(2).run(places, helix={}) == [(0, 0, 0, 0), (0, 0, 0, 1)]


def test_scripts_are_told_once_that_ranks_share_batches(cluster_of: Any) -> None:
    lines = cluster_of(2).run(told)[0]
    assert len(lines) == 3
    assert "accelerator.gather returns a row for each of 2 processes, and 2 of them share each batch" in lines[0]
    assert "its sum counts a batch 2 times" in lines[1]
    assert "num_processes // parallelism_config.tp_size, 1 here" in lines[2]
