"""Data parallelism around a pipeline: sums of gradients, their norm, who gets which data."""

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
from hf_helix.runtime.runner import Runner

# -- what the ranks run ------------------------------------------------------------------------------------------------


def samples_of(folder: str, helix: dict[str, Any] | None) -> list[list[int]]:
    """The first tokens of every sample of a stream that this rank trains on, in order."""
    options = {"max_steps": 5, "gradient_accumulation_steps": 2, "accelerator_config": {"dispatch_batches": False}}
    stream = jobs.Stream(sequences(40))
    trainer = jobs.build(folder, helix, options, model=llama(**model_of()), train_dataset=stream)
    seen: list[list[int]] = []
    prepare = trainer._prepare_inputs

    def noted(batch: dict[str, Tensor]) -> Any:
        seen.extend(row[:6].tolist() for row in batch["input_ids"])
        return prepare(batch)

    trainer._prepare_inputs = noted  # type: ignore[method-assign]
    trainer.train()
    return seen


def train_twice(folder: str, helix: dict[str, Any]) -> list[float]:
    """One trainer, two calls of train(): the second goes on with the optimizer of the first."""
    trainer = jobs.make_trainer(folder, helix, model=model_of(), training={"max_steps": 2})
    trainer.train()
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def windows(**case: Any) -> list[dict[str, Any]]:
    """As `pipeline_jobs.windows`, in small buckets."""
    with buckets_of(SMALL):
        return pipeline_jobs.windows(**case)


@plain_parameters()
def reductions(folder: str, helix: dict[str, Any], model: dict[str, Any], count: int = 3) -> dict[str, Any]:
    """One window: this rank's gradients as it saw them, and complete for every size of buckets; and the norm."""
    trainer: Any = pipeline_jobs.make(folder, helix, model_of(**model))
    trainer.model.train()
    runner, streams = trainer.helix.runner, trainer.helix.runner.executor.streams
    window = pipeline_jobs.window_of(trainer, count, 2, LENGTHS)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    rows = runner.rank_units.own_rows

    def run(runner: Runner, complete: bool) -> dict[str, Any]:
        trainer.model.zero_grad()
        runner.train_window(window, complete=complete)
        return {names[p]: p.grad.numpy().copy() for p in rows if p.grad is not None}

    result: dict[str, Any] = {"seen": run(runner, complete=False)}
    result["complete"] = {size: run(with_buckets(runner, size), complete=True) for size in SIZES}
    result["sums"] = {names[p]: row.cut.sums_gradient for p, row in rows.items()}
    result["norm"] = trainer.helix.gradient_norm().item()
    streams.close()
    return result


# -- the tests --------------------------------------------------------------------------------------------------------

SMALL, TINY = 8_000, 1  # bytes: a few parameters in a bucket, and one in each
SIZES = (0, SMALL, TINY)
LENGTHS = (9, 5, 8)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "tied"), [(2, 1, 2, False), (1, 2, 2, True), slow(1, 1, 3, False), slow(2, 2, 2, True)]
)
def test_sums_in_buckets(tp: int, pp: int, dp: int, tied: bool, cluster_of: Any, tmp_path: Path) -> None:
    """Parts of the sequence (tp) are added up, batches (dp) averaged, in any number of buckets, and the ranks of one
    shard have the same bits: otherwise their parameters would drift apart. With two summands, buckets do not matter to
    the bits either. The norm is that of the unsplit model on all batches: what several ranks copy counts once."""
    helix = {"tp_size": tp, "pp_size": pp, "plan": "sequential", "schedule": "folded_1f1b"}
    model = {"tie_word_embeddings": tied}
    ranks, shared = cluster_of(tp * pp * dp).run(reductions, folder=str(tmp_path), helix=helix, model=model), tp * pp
    for rank, result in enumerate(ranks):
        place, t = rank % shared, rank % tp
        first = ranks[place]["complete"]
        for name, own in result["seen"].items():
            if tied and "embed_tokens" in name:  # summed over the ranks of the pipeline, too
                continue
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
        for size, complete in result["complete"].items():
            assert complete.keys() == result["seen"].keys()
            for name, gradient in complete.items():
                same = 0 if max(tp, dp) == 2 else size
                np.testing.assert_array_equal(gradient, first[same][name], err_msg=f"{name} {size}")
    whole = reference(model_of(**model), batches_of(3 * dp, lengths=LENGTHS))["gradients"]
    norm = np.sqrt(sum(np.sum(gradient.astype(np.float64) ** 2) for gradient in whole.values()))
    assert len({result["norm"] for result in ranks}) == 1
    assert ranks[0]["norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("pp", "dp"), [(1, 3), slow(2, 2)])
def test_plans_and_schedules_give_the_same_bits(pp: int, dp: int, cluster_of: Any, tmp_path: Path) -> None:
    """What is in a bucket and the order of its sums do not depend on when it is complete."""
    rules = ("sequential", "greedy", "round_robin", "dhelix")
    cases = [(rule, schedule, 4) for schedule in ("folded_1f1b", "dualpipe_v")[:pp] for rule in rules]
    job = {"folder": str(tmp_path), "helix": {"pp_size": pp, "plan": "sequential"}, "model": model_of()}
    for result in cluster_of(pp * dp).run(windows, cases=cases, lengths=LENGTHS, **job):
        for case, run in zip(cases, result, strict=True):
            assert run["losses"] == result[0]["losses"], case
            for name, gradient in run["gradients"].items():
                if gradient is not None:
                    np.testing.assert_array_equal(gradient, result[0]["gradients"][name], err_msg=f"{name} {case}")


def test_two_calls_of_train_go_on_with_the_shared_states(cluster_of: Any, tmp_path: Path) -> None:
    plain, shared = (
        cluster_of(2).run(train_twice, folder=str(tmp_path), helix=helix) for helix in ({}, {"shard_optimizer": True})
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


@pytest.mark.parametrize(("case", "pp"), [("last batch", 1), ("last window", 2)])
def test_a_last_batch_that_does_not_divide(case: str, pp: int, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """Against the stock Trainer on two processes (DDP)."""
    expected, _ = stock(train, 2, **UNEVEN[case])
    helix = {"pp_size": pp, "plan": "greedy"}
    for result in cluster_of(2 * pp).run(train, folder=str(tmp_path), helix=helix, **UNEVEN[case]):
        compare_runs(result, expected, steps=4)


def test_every_batch_goes_to_the_ranks_that_share_it(cluster_of: Any, tmp_path: Path) -> None:
    """Two pipelines of two ranks, 40 samples, 5 steps of 2 x 2: an epoch, each sample once; as DDP deals them out."""
    expected = cluster_of(2).run(samples_of, folder=str(tmp_path), helix=None)
    ranks = cluster_of(4).run(samples_of, folder=str(tmp_path), helix={"pp_size": 2, "plan": "greedy"})
    assert ranks[0] == ranks[1] == expected[0]
    assert ranks[2] == ranks[3] == expected[1]
    together = [tuple(sample) for sample in ranks[0] + ranks[2]]
    assert len(together) == len(set(together)) == 40
