"""Figures of the logs of real trainings on two ranks, and the trace that a trainer writes."""

import contextlib
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.jobs import make_trainer
from support.marks import slow
from support.models import llama
from support.tuning_jobs import hasty
from transformers import TrainerCallback

from hf_helix.report.flops import token_flops
from hf_helix.report.live import SHORT

# -- what the ranks run ------------------------------------------------------------------------------------------------


def score(folder: str, helix: dict[str, Any], trace: str = "", measure: bool = False, **options: Any) -> dict[str, Any]:
    """Train, and return the logs; write a trace; measure the overlap at the end."""
    with hasty(), contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(folder, {"tp_size": 2, **helix}, **options)
        trainer.train()
    if trace:
        trainer.trace(trace)
    result = {
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "other_logs": [entry for entry in trainer.state.log_history if "loss" not in entry],
        "figures": trainer.helix.figures,
        "plan": trainer.plan.rule,
        "still_traced": trainer.helix.runner.executor.streams.trace is not None,
        "gradients": sum(parameter.grad is not None for parameter in trainer.model.parameters()),
    }
    if measure:
        overlap = trainer.measure_overlap(repeats=1)
        result["overlap"] = {
            "bytes_moved": overlap.bytes_moved,
            "by_kind": dict(overlap.overlapped_by_kind),
            "overlapped": overlap.overlapped_fraction,
            "tokens": overlap.tokens,
        }
    return result


class Measures(TrainerCallback):
    """Measures between the backward passes of the first step and the step."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.trainer is not None and state.global_step == 0:
            self.trainer.measure_overlap(repeats=1)
            self.trainer.measure_memory()


def measure_between(folder: str, measures: bool) -> dict[str, Any]:
    """Trains experts, measured in the first step if asked; returns the losses, the figures of the routers over two
    steps, and whether `eval()` holds."""
    callback = Measures()
    with contextlib.redirect_stdout(io.StringIO()):
        case = {**CASE, "model": {**CASE["model"], "family": "phimoe"}}
        trainer = make_trainer(folder, {"ep_size": 2, "plan": "greedy"}, callbacks=[callback], **case)
        callback.trainer = trainer if measures else None
        trainer.train()
    trainer.model.eval()
    trainer.measure_memory()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    figures = [[entry[name] for entry in logs] for name in ("loss", "helix/router_z", "helix/expert_imbalance")]
    return {"figures": figures, "trains": any(module.training for module in trainer.model.modules())}


def first_line(folder: str, helix: dict[str, Any], **options: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        make_trainer(folder, helix, **options)
    return output.getvalue()


def trace_untrained(folder: str) -> None:
    make_trainer(folder, {"tp_size": 2, "plan": "greedy"}).trace(str(Path(folder) / "trace.json"))


# -- the tests --------------------------------------------------------------------------------------------------------

CASE = {
    "model": {"num_hidden_layers": 2},
    "data": {"count": 40, "lengths": (16,)},
    "training": {"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 2},
}
SPEED = {"helix/tokens_per_second", "helix/tflops_per_device"}


@pytest.mark.parametrize(
    ("helix", "model", "said"),
    [
        ({"tp_size": 2}, {}, "LlamaForCausalLM (declared) on tp 2; first plan greedy (plan=auto), CUDA graphs off"),
        slow(
            {"shard_parameters": True, "plan": "sequential"},
            {"family": "gpt_neox"},
            "GPTNeoXForCausalLM (derived) on dp 2, shard_parameters=True; first plan sequential (plan=sequential), "
            "CUDA graphs off",
        ),
        (
            {"pp_size": 2, "recompute": "full"},
            {"num_hidden_layers": 4},
            "LlamaForCausalLM (declared) on pp 2, recompute=full; first plan greedy (plan=auto), schedule auto, "
            "CUDA graphs off",
        ),
    ],
    ids=["tp2", "shard_parameters", "pp2"],
)
def test_the_first_line_says_the_layout(
    helix: dict[str, Any], model: dict[str, Any], said: str, cluster_of: Any, tmp_path: Path
) -> None:
    first, second = cluster_of(2).run(first_line, folder=str(tmp_path), helix=helix, model=model)
    assert first.splitlines()[-1] == f"hf_helix: {said}"
    assert second == ""


def test_measuring_leaves_training_as_it_was(cluster_of: Any, tmp_path: Path) -> None:
    alone, measured = (
        cluster_of(2).run(measure_between, folder=str(tmp_path), measures=measures) for measures in (False, True)
    )
    assert measured == alone
    assert not any(result["trains"] for result in measured)
    assert all(first != second for first, second in measured[0]["figures"])


def tuned_case(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "helix": {"tp_size": 2, "plan": "search", "cache": False}, **CASE}


def test_logs_of_a_real_training(cluster_of: Any, tmp_path: Path) -> None:
    """After tuning, in the same training; and what everything else logs is still there."""
    result = cluster_of(2).run(score, **tuned_case(tmp_path), trace=str(tmp_path / "trace.json"))
    flops = token_flops(llama(num_hidden_layers=2)).causal(16)
    for rank in result:
        assert rank["plan"] == "search"
        assert len(rank["logs"]) == 2
        for entry in rank["logs"]:
            ours = {key for key in entry if key.startswith("helix/")}
            assert {"helix/overlapped_fraction"} <= ours <= set(SHORT)
            assert {"loss", "grad_norm", "learning_rate", "epoch", "step"} <= entry.keys()
            assert all(0 <= entry[key] <= 1 for key in ours)
        figures = rank["figures"]
        assert SPEED | {"helix/overlapped_fraction", "helix/exposed_ms"} <= figures.keys()
        # A window has 64 tokens; anything from 6 ms to a minute may pass for it.
        assert 1 < figures["helix/tokens_per_second"] < 1e4
        each = figures["helix/tokens_per_second"] * flops / 2 / 1e12
        assert figures["helix/tflops_per_device"] == pytest.approx(each, rel=1e-4)
        assert 0 <= figures["helix/exposed_ms"] < 6e4
        assert not any(key.startswith("helix/") for entry in rank["other_logs"] for key in entry)
        assert not rank["still_traced"]
        assert rank["gradients"] == 0
    check_trace(tmp_path / "trace.json")


def check_trace(path: Path) -> None:
    """Both ranks, every operator of both micro-batches of the last window."""
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    runs = [event for event in events if event["ph"] == "X"]
    by_rank = [Counter((e["name"], e["args"]["unit"], e["cat"]) for e in runs if e["pid"] == pid) for pid in (1, 2)]
    assert by_rank[0] == by_rank[1]
    assert set(by_rank[0].values()) == {1}
    assert {e["args"]["microbatch"] for e in runs} == {0, 1}
    assert {e["cat"] for e in runs} == {"compute", "intra_node"}
    assert sum(name.startswith("F0.") and unit == "layers.1" for name, unit, _ in by_rank[0]) == 14
    assert all(event["dur"] > 0 for event in runs)


def test_logs_of_a_plan_that_needs_no_measurement(cluster_of: Any, tmp_path: Path) -> None:
    """Nothing was measured alone, so nothing is said of it; `measure_overlap` says what a window moves."""
    case = {"folder": str(tmp_path), "helix": {"tp_size": 2, "plan": "greedy"}, **CASE}
    first, second = cluster_of(2).run(score, **case, measure=True)
    for entry in first["logs"] + second["logs"]:
        assert {key for key in entry if key.startswith("helix/")} == {"helix/overlapped_fraction"}
    for rank in (first, second):
        assert rank["figures"].keys() == SPEED | {"helix/overlapped_fraction", "helix/exposed_ms"}
        overlap = rank["overlap"]
        assert overlap["tokens"] == 2 * 2 * 16
        assert overlap["by_kind"] == {"intra_node": pytest.approx(overlap["overlapped"])}
        assert rank["gradients"] == 0
    # A shard is half of 16 tokens of 2 sequences, 32 numbers each, in fp32; a rank sends it to one other. Per
    # micro-batch: 2 layers with 4 collectives forward and 4 backward, 2 of the embedding, 2 of the head; and in the
    # head the statistics of the loss.
    shard = 8 * 2 * 32 * 4
    hidden = 2 * (2 * 8 + 2 + 2) * shard
    assert first["overlap"]["bytes_moved"] == second["overlap"]["bytes_moved"]
    assert hidden < first["overlap"]["bytes_moved"] < 1.2 * hidden


@pytest.mark.parametrize("helix", [{"cp_size": 2}, slow({})], ids=str)
def test_a_trace_has_the_sums_of_gradients(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Of ranks that see other tokens, be they of other sequences or of the same."""
    path, options = tmp_path / "trace.json", {"tp_size": 1, "plan": "greedy", **helix}
    cluster_of(2).run(score, folder=str(tmp_path), helix=options, trace=str(path), **CASE)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events if event["cat"] == "gradients"} == {1, 2}


def test_a_trace_needs_a_window(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).assert_raises(trace_untrained, "after train()", folder=str(tmp_path))


def test_data_parallel_ranks_have_nothing_to_hide(cluster_of: Any, tmp_path: Path) -> None:
    """Each with a batch of its own: twice the tokens, and no communication that a plan could order."""
    case = {"folder": str(tmp_path), "helix": {"tp_size": 1, "plan": "auto"}, **CASE}
    flops = token_flops(llama(num_hidden_layers=2)).causal(16)
    for rank in cluster_of(2).run(score, **case):
        assert not any(key.startswith("helix/") for entry in rank["logs"] for key in entry)
        figures = rank["figures"]
        assert figures.keys() == SPEED
        each = figures["helix/tokens_per_second"] * flops / 2 / 1e12
        assert figures["helix/tflops_per_device"] == pytest.approx(each, rel=1e-4)
