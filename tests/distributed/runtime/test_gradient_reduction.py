"""Data parallelism around a pipeline: sums of gradients, their norm, shares of the optimizer, who gets which data."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import jobs, pipeline_jobs
from support.comparisons import compare_runs
from support.marks import slow
from support.models import llama, sequences
from support.pipeline_jobs import batches_of, reference
from support.pipeline_trainer_jobs import buckets_of, model_of, train, with_buckets
from torch import Tensor

from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.gradients import reduce as gradients
from hf_helix.runtime.runner import Runner

# -- what the ranks run ------------------------------------------------------------------------------------------------


def samples_of(folder: str, helix: dict[str, Any] | None, count: int, streamed: bool, steps: int) -> list[list[int]]:
    """The first tokens of every sample that this rank trains on, in order."""
    rows = sequences(count)
    options: dict[str, Any] = {"max_steps": steps, "gradient_accumulation_steps": 2}
    if streamed:
        options["accelerator_config"] = {"dispatch_batches": False}
    dataset: Any = jobs.Stream(rows) if streamed else rows
    trainer = jobs.build(folder, helix, options, model=llama(**model_of()), train_dataset=dataset)
    seen: list[list[int]] = []
    prepare = trainer._prepare_inputs

    def noted(batch: dict[str, Tensor]) -> Any:
        seen.extend(row[:6].tolist() for row in batch["input_ids"])
        return prepare(batch)

    trainer._prepare_inputs = noted  # type: ignore[method-assign]
    trainer.train()
    return seen


def train_twice(folder: str, helix: dict[str, Any], **options: Any) -> list[float]:
    """One trainer, two calls of train(): the second goes on with the optimizer of the first."""
    trainer = jobs.make_trainer(folder, helix, model=model_of(), **options)
    trainer.train()
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def windows(bucket_bytes: int, **case: Any) -> list[dict[str, Any]]:
    """As `pipeline_jobs.windows`."""
    with buckets_of(bucket_bytes):
        return pipeline_jobs.windows(**case)


@plain_parameters()
def reductions(
    folder: str, helix: dict[str, Any], sizes: Sequence[int], model: dict[str, Any], count: int = 3
) -> dict[str, Any]:
    """One window: this rank's gradients as it saw them, and complete for every size of buckets; and the norm."""
    trainer: Any = pipeline_jobs.make(folder, helix, model_of(**model))
    trainer.model.train()
    runner, streams = trainer.helix.runner, trainer.helix.runner.executor.streams
    window = pipeline_jobs.window_of(trainer, count, 2, (9, 5, 8))
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    placements = runner.rank_units.placements

    def run(runner: Runner, complete: bool) -> dict[str, Any]:
        trainer.model.zero_grad()
        runner.train_window(window, complete=complete)
        return {names[p]: p.grad.numpy().copy() for p in placements if p.grad is not None}

    result: dict[str, Any] = {"seen": run(runner, complete=False), "complete": {}}
    for size in sizes:
        result["complete"][size] = run(with_buckets(runner, size), complete=True)
    result["sums"] = {names[p]: placement.sums_gradient for p, placement in placements.items()}
    result["norm"] = gradients.gradient_norm(placements, trainer.helix.mesh).item()
    result["whole"] = pipeline_jobs.whole_gradients(trainer)
    streams.close()
    return result


# -- the tests --------------------------------------------------------------------------------------------------------

SMALL, TINY = 8_000, 1  # bytes: a few parameters in a bucket, and one in each
LENGTHS = (9, 5, 8)


def squared(gradients: dict[str, Any]) -> float:
    return float(sum(np.sum(gradient.astype(np.float64) ** 2) for gradient in gradients.values()))


# Sums in buckets


@pytest.fixture(scope="module")
def reduced(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By layout, what every rank saw and what it had after the sums; each layout run once."""

    @functools.cache
    def get(tp: int, pp: int, dp: int, tied: bool) -> list[dict[str, Any]]:
        helix = {"tp_size": tp, "pp_size": pp, "plan": "sequential", "schedule": "folded_1f1b"}
        job = {"folder": str(tmp_path_factory.mktemp("reduced")), "helix": helix, "sizes": [0, SMALL, TINY]}
        return cluster_of(tp * pp * dp).run(reductions, model={"tie_word_embeddings": tied}, **job)

    return get


MORE = ((1, 2, 2), (1, 1, 3), (2, 2, 1), (1, 1, 4), (2, 2, 2))
LAYOUTS = [(2, 1, 2), *(slow(*sizes) for sizes in MORE)]


@pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS)
def test_complete_gradients_are_the_plain_sums(tp: int, pp: int, dp: int, reduced: Any) -> None:
    """Of what the ranks saw: parts of the sequence (tp) added up, batches (dp) averaged; in any number of buckets."""
    ranks = reduced(tp, pp, dp, False)
    shared = tp * pp
    for rank, result in enumerate(ranks):
        place, t = rank % shared, rank % tp
        for name, own in result["seen"].items():
            members = range(tp) if result["sums"][name] else [t]
            seen = [
                ranks[d * shared + place - t + member]["seen"][name].astype(np.float64)
                for d in range(dp)
                for member in members
            ]
            expected = sum(seen) / dp
            assert own.shape == expected.shape
            for size, complete in result["complete"].items():
                error = np.linalg.norm(complete[name] - expected)
                assert error <= 1e-6 * np.linalg.norm(expected), (name, size)


@pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS)
def test_ranks_of_one_shard_have_the_same_bits(tp: int, pp: int, dp: int, reduced: Any) -> None:
    """Otherwise their parameters would drift apart. With two summands, buckets do not matter to the bits either."""
    ranks, shared = reduced(tp, pp, dp, False), tp * pp
    for rank, result in enumerate(ranks):
        first = ranks[rank % shared]["complete"]
        for size, complete in result["complete"].items():
            assert complete.keys() == result["seen"].keys()
            for name, gradient in complete.items():
                np.testing.assert_array_equal(gradient, first[size][name], err_msg=f"{name} {size}")
                if max(tp, dp) == 2:
                    np.testing.assert_array_equal(gradient, first[0][name], err_msg=f"{name} {size}")


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "tied"),
    [
        *((2, 1, 2, False), (1, 2, 2, True)),
        *(slow(1, 2, 1, tied) for tied in (False, True)),
        *(slow(2, 2, 1, tied) for tied in (False, True)),
        *(slow(*s) for s in ((1, 2, 2, False), (2, 2, 2, False), (2, 2, 2, True))),
    ],
)
def test_the_norm_is_that_of_the_whole_model(tp: int, pp: int, dp: int, tied: bool, reduced: Any) -> None:
    """Against the unsplit model on the batches of all ranks; what several ranks copy counts once."""
    ranks = reduced(tp, pp, dp, tied)
    model = model_of(tie_word_embeddings=tied)
    expected = np.sqrt(squared(reference(model, batches_of(3 * dp, lengths=LENGTHS))["gradients"]))
    assert len({result["norm"] for result in ranks}) == 1
    assert ranks[0]["norm"] == pytest.approx(expected, rel=1e-5)
    assert ranks[0]["norm"] == pytest.approx(np.sqrt(squared(ranks[0]["whole"])), rel=1e-6)


@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [
        (1, 1, 3),
        *(slow(*sizes) for sizes in ((2, 1, 2), (1, 1, 4), (1, 2, 2), (2, 2, 2))),
    ],
)
@pytest.mark.parametrize("bucket_bytes", [SMALL, slow(0)])
def test_plans_and_schedules_give_the_same_bits(
    tp: int, pp: int, dp: int, bucket_bytes: int, cluster_of: Any, tmp_path: Path
) -> None:
    """What is in a bucket and the order of its sums do not depend on when it is complete."""
    rules = ("sequential", "greedy", "round_robin", "dhelix")
    cases = [(rule, schedule, 4) for schedule in ("folded_1f1b", "dualpipe_v")[:pp] for rule in rules]
    helix = {"tp_size": tp, "pp_size": pp, "plan": "sequential"}
    job = {
        "folder": str(tmp_path),
        "helix": helix,
        "model": model_of(),
        "cases": cases,
        "lengths": LENGTHS,
    }
    for result in cluster_of(tp * pp * dp).run(windows, bucket_bytes=bucket_bytes, **job):
        for case, run in zip(cases, result, strict=True):
            assert run["losses"] == result[0]["losses"], case
            for name, gradient in run["gradients"].items():
                if gradient is not None:
                    np.testing.assert_array_equal(gradient, result[0]["gradients"][name], err_msg=f"{name} {case}")


# Shares of the optimizer

OPTIMIZERS = ["adamw_torch", *(slow(name) for name in ("adamw_torch_fused", "rmsprop"))]


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_two_calls_of_train_go_on_with_the_shared_states(optim: str, cluster_of: Any, tmp_path: Path) -> None:
    training = {"max_steps": 2, "optim": optim}
    plain, shared = (
        cluster_of(2).run(train_twice, folder=str(tmp_path), helix=helix, training=training)
        for helix in ({}, {"shard_optimizer": True})
    )
    np.testing.assert_allclose(shared, plain, rtol=0, atol=1e-6)


# Who gets which data

UNEVEN: dict[str, dict[str, Any]] = {
    # 21 samples, 2 a batch, 2 ranks: the last batch has one sample, and one rank none.
    "last batch": {"data": {"count": 21}, "training": {"max_steps": -1, "num_train_epochs": 1}},
    "last window": {
        "data": {"count": 26, "lengths": (17, 9, 13), "padding": "right"},
        "training": {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4},
    },
}


@pytest.mark.parametrize(
    ("case", "pp"),
    [
        *(("last batch", 1), ("last window", 2)),
        *(slow(*each) for each in (("last batch", 2), ("last window", 1))),
    ],
)
def test_a_last_batch_that_does_not_divide(case: str, pp: int, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """Against the stock Trainer on two processes (DDP)."""
    expected, _ = stock(train, 2, **UNEVEN[case])
    helix = {"pp_size": pp, "plan": "greedy"}
    for result in cluster_of(2 * pp).run(train, folder=str(tmp_path), helix=helix, **UNEVEN[case]):
        compare_runs(result, expected, steps=4)


@pytest.mark.parametrize("streamed", [slow(False), True], ids=["list", "stream"])
def test_every_batch_goes_to_the_ranks_that_share_it(streamed: bool, cluster_of: Any, tmp_path: Path) -> None:
    """Two pipelines of two ranks, 40 samples, 5 steps of 2 x 2: an epoch, each sample once; as DDP deals them out."""
    job = {"folder": str(tmp_path), "count": 40, "streamed": streamed, "steps": 5}
    expected = cluster_of(2).run(samples_of, helix=None, **job)
    ranks = cluster_of(4).run(samples_of, helix={"pp_size": 2, "plan": "greedy"}, **job)
    assert ranks[0] == ranks[1] == expected[0]
    assert ranks[2] == ranks[3] == expected[1]
    together = [tuple(sample) for sample in ranks[0] + ranks[2]]
    assert len(together) == len(set(together)) == 40
