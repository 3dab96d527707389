"""A slow rank is named by a training, with its cause: in a line, in the logs, on the card."""

import contextlib
import io
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from support.jobs import make_trainer
from support.loop_jobs import reset
from support.marks import slow
from support.models import sequences, tiny
from transformers import TrainerCallback, default_data_collator

from benchmarks.stragglers import Core, Stops
from hf_helix import HelixConfig, HelixPlugin
from hf_helix.runtime.stragglers import looks
from hf_helix.runtime.stragglers.verdict import COMPUTING, DATA, HOST, LINK

SLOW, BEGIN, STEPS = 1, 10, 40
TRAINING = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "logging_steps": 1, "save_strategy": "no"}
MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
DATA_OPTIONS = {"count": 200, "lengths": (32,)}

# -- what the ranks run ------------------------------------------------------------------------------------------------


class Rows:
    """Samples that may come late."""

    def __init__(self) -> None:
        self.rows, self.seconds = sequences(**DATA_OPTIONS), 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.rows[index]


class Fault(TrainerCallback):
    """A fault of a rank, from a step to the end."""

    def __init__(self, fault: str, rows: Rows) -> None:
        self.fault, self.rows = fault, rows
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.process_index != SLOW or state.global_step != BEGIN:
            return
        if self.fault == "data":
            self.rows.seconds = 0.02
        elif self.fault == "core":
            Core.is_slow = True
        elif self.fault == "link":
            self.trainer.helix.mesh.link.rate /= 2
        elif self.fault == "host":
            self.host = Stops()
            self.host.begin()

    def on_train_end(self, *args: Any, **given: Any) -> None:
        Core.is_slow = False
        if hasattr(self, "host"):
            self.host.end()


def train(folder: str, fault: str, **helix: Any) -> dict[str, Any]:
    """Trains with a fault; returns what rank 0 says of it."""
    rows, said = Rows(), io.StringIO()
    callback = Fault(fault, rows)
    own = Path(folder, os.environ["RANK"])
    with contextlib.redirect_stdout(said), mock.patch.object(looks, "MOST", 1.0), slowable(fault == "core"):
        given = {"model": MODEL, "training": TRAINING, "train_dataset": rows, "callbacks": [callback]}
        trainer = make_trainer(str(own), {"plan": "greedy", **helix}, **given)
        callback.trainer = trainer
        trainer.train()
        time.sleep(1)
    trainer.create_model_card()
    card = own / "README.md"
    return {
        "named": [each.verdict.about for each in trainer.helix.session.looks.named],
        "said": [line for line in said.getvalue().splitlines() if "wait for" in line],
        "logs": [
            {name: value for name, value in entry.items() if name.startswith("helix/slowest_rank")}
            for entry in trainer.state.log_history
            if "helix/slowest_rank" in entry
        ],
        "card": card.read_text() if card.exists() else "",
    }


@contextlib.contextmanager
def slowable(is_asked: bool) -> Any:
    """Operators that may take twice as much of a core, of trainers made in the context."""
    from hf_helix.runtime.executor import BoundComputation

    stock = BoundComputation.__init__
    with mock.patch("benchmarks.stragglers.SLOWER", 2.0):
        if is_asked:
            Core.install()
        try:
            yield
        finally:
            BoundComputation.__init__ = stock  # type: ignore[method-assign]


def train_in_a_loop() -> list[Any]:
    """A loop around Accelerate with late data; returns what rank 0 has named, and the figures of the end."""
    torch.manual_seed(0)
    reset()
    rows = Rows()
    with mock.patch.object(looks, "MOST", 1.0), contextlib.redirect_stdout(io.StringIO()):
        plugin = HelixPlugin(HelixConfig(plan="greedy"))
        accelerator = Accelerator(cpu=True, parallelism_config=plugin, gradient_accumulation_steps=2)
        model = tiny(**MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(rows, 2, collate_fn=default_data_collator)  # type: ignore[arg-type]
        model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader, seed=0)
        for number, window in enumerate(model.windows(loader)):
            model.train_window(window)
            optimizer.step()
            optimizer.zero_grad()
            if number == BEGIN and accelerator.process_index == SLOW:
                rows.seconds = 0.02
        time.sleep(1)
        figures = model.engine.diagnostics.log_entries()
    return [[each.verdict.about for each in model.engine.session.looks.named], figures]


# -- the tests ---------------------------------------------------------------------------------------------------------

CASES = [
    ("data", DATA, {}),
    slow("core", COMPUTING, {"tp_size": 2}),
    slow("link", LINK, {"tp_size": 2, "link": "25mbit"}),
    slow("host", HOST, {"tp_size": 2}),
]


@pytest.mark.parametrize(("fault", "cause", "helix"), CASES)
def test_a_slow_rank_is_named(fault: str, cause: str, helix: Any, cluster_of: Any, tmp_path: Path) -> None:
    first, second = cluster_of(2).run(train, folder=str(tmp_path), fault=fault, **helix)
    ((about, count),) = Counter(first["named"]).most_common(1)
    assert about == ((SLOW,), cause), first["named"]
    assert count >= 3, first["named"]
    assert any(
        line.startswith(f"hf_helix: the others wait for rank {SLOW} (") and cause in line for line in first["said"]
    )
    assert second["named"] == second["said"] == []
    assert first["logs"] == second["logs"]
    most = max(first["logs"], key=lambda entry: entry["helix/slowest_rank_share"])
    assert most["helix/slowest_rank"] == SLOW
    assert 0.02 < most["helix/slowest_rank_share"] <= 1
    assert f"the others wait for rank {SLOW}" in first["card"]


def test_a_loop_around_accelerate_names_them_as_well(cluster_of: Any) -> None:
    (named, figures), (none, same) = cluster_of(2).run(train_in_a_loop)
    assert ((SLOW,), DATA) in named
    assert none == []
    assert figures["helix/slowest_rank"] == same["helix/slowest_rank"] == SLOW
