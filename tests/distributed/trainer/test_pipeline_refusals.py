"""Pipelines that cannot run are refused on every rank, with the same words."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.marks import slow
from support.models import llama, sequences
from support.pipeline_trainer_jobs import model_of, train

from hf_helix import HelixConfig
from hf_helix.planning.schedule.actions import format_schedule
from hf_helix.planning.schedule.named import build_schedule

# -- what the ranks run ------------------------------------------------------------------------------------------------


def own_rank() -> int:
    """Also before there is a process group."""
    return int(os.environ["RANK"])


def construct_by_rank(folder: str, by_rank: Sequence[dict[str, Any]]) -> None:
    """Every rank brings other options."""
    jobs.construct(folder, by_rank[own_rank()], model=model_of())


class OwnLength(jobs.Stream):
    """A stream that ends at another place on every data-parallel rank."""

    def __init__(self, rows: list[dict[str, Any]], lengths: Sequence[int], ranks_per_batch: int) -> None:
        super().__init__(rows[: lengths[own_rank() // ranks_per_batch]])


def train_on_streams_of_other_lengths(folder: str, helix: dict[str, Any], lengths: Sequence[int]) -> None:
    """Streams that end early on some data-parallel ranks."""
    dataset = OwnLength(sequences(60), lengths, HelixConfig(**helix).ranks_per_batch)
    training = {"max_steps": 6, "gradient_accumulation_steps": 3, "accelerator_config": {"dispatch_batches": False}}
    jobs.build(folder, helix, training, model=llama(**model_of()), train_dataset=dataset).train()


def train_with_accumulation_of_rank(folder: str, helix: dict[str, Any], late: bool) -> None:
    """Windows of another number of micro-batches on every rank; `late`: from after construction on."""
    steps = 2 + own_rank()
    training = {"gradient_accumulation_steps": 2 if late else steps, "max_steps": 2}
    trainer = jobs.make_trainer(folder, helix, model=model_of(), training=training)
    trainer.args.gradient_accumulation_steps = steps
    trainer.train()


# -- the tests --------------------------------------------------------------------------------------------------------

PIPE = {"pp_size": 2, "plan": "greedy"}


# Schedules


GOOD = format_schedule(build_schedule("folded_1f1b", 2, 3))


def with_file(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "actions.txt"
    path.write_text(text)
    return {**PIPE, "schedule": str(path)}


def test_action_files_that_do_not_fit(cluster_of: Any, tmp_path: Path) -> None:
    helix = with_file(tmp_path, format_schedule(build_schedule("folded_1f1b", 3, 4)))
    said = "lines for 3 ranks and pp_size=2 needs 2"
    job: dict[str, Any] = {"folder": str(tmp_path), "model": model_of(), "alike": True}
    cluster_of(2).assert_raises(jobs.construct, said, helix=helix, **job)
    # Said before anything is trained: the number of micro-batches is known.
    helix = with_file(tmp_path, GOOD)
    training = {"gradient_accumulation_steps": 4}
    words = helix["schedule"], "is for 3 micro-batches and the window has 4", "schedule='auto'"
    cluster_of(2).assert_raises(jobs.construct, *words, helix=helix, training=training, **job)


def test_an_action_file_for_more_micro_batches_serves(cluster_of: Any, tmp_path: Path) -> None:
    """What is missing is left out, the losses are the named schedule's, and evaluation makes do with it, too."""
    training = {"gradient_accumulation_steps": 2, "max_steps": 3, "per_device_eval_batch_size": 5}
    job = {"folder": str(tmp_path), "training": training}
    result = [cluster_of(2).run(train, helix=helix, **job)[0] for helix in (PIPE, with_file(tmp_path, GOOD))]
    assert result[0]["losses"] == result[1]["losses"]
    assert result[0]["eval"] == pytest.approx(result[1]["eval"], abs=1e-5)


# Ranks that do not agree

DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "schedules": ({"schedule": "folded_1f1b"}, {"schedule": "dualpipe_v"}),
    "named and found": ({"schedule": "folded_1f1b"}, {"schedule": "auto"}),
    "placements": ({"schedule": "folded_1f1b"}, {"schedule": "1f1b"}),
    "layers_per_stage": ({"layers_per_stage": [1, 1, 1, 2]}, {"layers_per_stage": [1, 1, 2, 1]}),
    "plans": ({"plan": "greedy"}, {"plan": "sequential"}),
    "shards of the optimizer": ({"shard_optimizer": False}, {"shard_optimizer": True}),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_with_other_options(case: str, cluster_of: Any, tmp_path: Path) -> None:
    by_rank = [{**PIPE, **options} for options in DIFFERENT[case]]
    said = f"rank 0 and rank 1 have different {'plans' if case == 'plans' else 'options'}: line"
    job = {"folder": str(tmp_path), "by_rank": by_rank}
    cluster_of(2).assert_raises(construct_by_rank, said, alike=True, **job)


def test_ranks_with_other_action_files(cluster_of: Any, tmp_path: Path) -> None:
    """They begin alike, so that a window of one micro-batch would not show it."""
    text = format_schedule(build_schedule("folded_1f1b", 2, 6))
    texts = [text, text.replace(" 0B5", " 0I5 0W5")]
    by_rank = []
    for rank, text in enumerate(texts):
        (tmp_path / str(rank)).mkdir()
        by_rank.append(with_file(tmp_path / str(rank), text))
    job = {"folder": str(tmp_path), "by_rank": by_rank}
    said = "rank 0 and rank 1 have different options: line"
    cluster_of(2).assert_raises(construct_by_rank, said, alike=True, **job)


@pytest.mark.parametrize("helix", [PIPE, {**PIPE, "schedule": "1f1b"}, {"plan": "greedy"}], ids=str)
def test_windows_of_other_lengths(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": helix, "alike": True}
    words = "windows of different length (micro-batches by rank: [2, 3])", "max_steps"
    cluster_of(2).assert_raises(train_with_accumulation_of_rank, *words, late=True, **job)
    said = "'gradient_accumulation_steps=2' against 'gradient_accumulation_steps=3'"
    cluster_of(2).assert_raises(train_with_accumulation_of_rank, said, late=False, **job)


@pytest.mark.parametrize(
    ("processes", "helix", "counts"),
    [(2, {}, [2, 3]), slow(4, PIPE, [2, 2, 3, 3])],
    ids=str,
)
def test_a_dataset_that_ends_early_on_some_ranks(
    processes: int, helix: dict[str, Any], counts: list[int], cluster_of: Any, tmp_path: Path
) -> None:
    """Streams of 32 and 40 samples, of which each of two ranks gets half: 8 and 10 batches of 2, in windows of 3."""
    job = {"folder": str(tmp_path), "helix": helix, "lengths": [32, 40], "alike": True}
    words = [f"micro-batches by rank: {counts}", "the dataset of some ranks ends before that of the others"]
    words += ["Give every data-parallel rank as many samples", "max_steps"]
    cluster_of(processes).assert_raises(train_on_streams_of_other_lengths, *words, **job)


def test_a_dataset_that_ends_between_windows(cluster_of: Any, tmp_path: Path) -> None:
    """One rank has a window more, the other nothing at all."""
    job = {"folder": str(tmp_path), "helix": PIPE, "lengths": [24, 36], "alike": True}
    said = "micro-batches by rank: [0, 0, 3, 3]"
    cluster_of(4).assert_raises(train_on_streams_of_other_lengths, said, **job)
