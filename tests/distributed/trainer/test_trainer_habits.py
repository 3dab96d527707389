"""What users do with the stock Trainer they can do with HelixTrainer, and see the same; or it is refused by name.

The habits are those of Transformers' own tests of its Trainer, on a tiny Llama: docs/trainer.md.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from support.derived_models import HOME
from support.habit_jobs import HABITS, is_close, run_habits
from support.paths import ROOT

DOC = ROOT / "docs" / "trainer.md"

# What is refused, with words of the error.
REFUSED = {
    "hidden_states": "output_hidden_states=True: predictions would hold hidden_states .* ignore_keys",
    "hidden_states_for_metrics": "output_hidden_states=True: .*ignore_keys_for_eval",
    "batches_of_windows_changed": "change batches in the data collator, or use gradient_accumulation_steps=1",
    "batches_of_windows_written": "change batches in the data collator",
    "batches_of_windows_changed_when_fetched": "change batches in the data collator",
    "steps_of_ones_own": "does not call super|cannot be called directly; use .*training_step",
    "a_loss_of_ones_own": "Mine overrides compute_loss",
    "a_loss_assigned": "HelixTrainer overrides compute_loss",
    "a_loss_function_assigned": "compute_loss_func",
    "a_model_wrapped": "Mine overrides _wrap_model",
    "means_of_micro_batches": "model_accepts_loss_kwargs is False",
    "another_model_assigned": "has replaced the model",
    "a_search_of_what_is_refused": "auto_find_batch_size",
}
# The same, where the model is cut.
REFUSED_CUT = {
    **REFUSED,
    "losses_by_hand": r"cannot be called directly; use .*trainer\.prediction_step",
    "an_optimizer_factory": "optimizer_cls_and_kwargs=.*Factory.*elementwise = True",
    "a_search_whose_model_asks": "model_init asks the trial for layers, and on 2 ranks.*in hp_space",
    "a_search_that_prunes": "pruner=.* on 2 ranks.*leave it out",
}
ONE_PROCESS = {"workers"}  # the processes of a cluster may have none of their own
RANK_0 = {
    "a_search",
    "a_search_that_ends_early",
    "a_search_of_two_objectives",
}  # others have no result, as in the stock Trainer
SEARCHES = {name for name in HABITS if name.startswith("a_search")}
QUICK = {
    "stopped_inside_a_window",
    "loaders_of_ones_own",
    "a_stream_evaluated",
    "logits_left_out",
    "hidden_states",
    "hidden_states_for_metrics",
    "steps_by_hand",
    "losses_by_hand",
    "steps_watched",
    "batches_changed",
    "batches_of_windows_changed",
    "steps_of_ones_own",
    "a_loss_assigned",
    "a_model_wrapped",
    "means_of_micro_batches",
    "another_model_assigned",
    "counts",
    "what_the_log_says",
    "arguments_left_alone",
}


def known(names: set[str]) -> list[str]:
    """In the order of the file, searches only where Optuna is."""
    has_optuna = importlib.util.find_spec("optuna") is not None
    return [name for name in HABITS if name in names and (has_optuna or name not in SEARCHES)]


def differences(result: dict[str, Any], expected: dict[str, Any], refused: dict[str, str]) -> list[str]:
    said = []
    for name, value in expected.items():
        if name in refused:
            if not re.search(refused[name], str(result[name])):
                said.append(f"{name} is not refused: {result[name]}")
        elif not is_close(result[name], value):
            said.append(f"{name}: {result[name]}\n  stock: {value}")
    return said


def compare_on_two_ranks(names: set[str], cluster_of: Any, folder: Path, family: str = "llama") -> None:
    chosen = known(names - ONE_PROCESS)
    expected = run_habits(str(folder / "stock"), None, chosen, family)
    job = {"folder": str(folder / "helix"), "helix": {"plan": "sequential", "tp_size": 2}, "family": family}
    ranks = cluster_of(2).run("support.habit_jobs:run_habits", names=chosen, **job)
    for rank, result in enumerate(ranks):
        compared = {name: value for name, value in expected.items() if rank == 0 or name not in RANK_0}
        assert differences(result, compared, REFUSED_CUT) == [], f"rank {rank}"


def test_two_ranks(cluster_of: Any, tmp_path: Path) -> None:
    compare_on_two_ranks(QUICK, cluster_of, tmp_path)


@pytest.mark.slow
def test_other_habits_on_two_ranks(cluster_of: Any, tmp_path: Path) -> None:
    compare_on_two_ranks(HABITS.keys() - QUICK, cluster_of, tmp_path)


@pytest.mark.slow
def test_two_ranks_with_a_derived_model(cluster_of: Any, tmp_path: Path) -> None:
    compare_on_two_ranks(QUICK, cluster_of, tmp_path, f"{HOME}olmo2")


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    names = known(set(HABITS))
    expected = run_habits(str(tmp_path / "stock"), None, names)
    result = run_habits(str(tmp_path / "helix"), {"plan": "sequential"}, names)
    assert differences(result, expected, REFUSED) == []


def test_every_habit_has_a_line_in_the_docs() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", DOC.read_text().partition("\n## Habits")[2], re.MULTILINE)
    assert sorted(listed) == sorted(HABITS)
