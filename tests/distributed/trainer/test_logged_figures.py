"""What a training on two ranks says of itself: first line, figures of its logs, traces, model cards."""

import contextlib
import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from support.cards import card_in, cells, launch_file
from support.jobs import make_trainer
from support.models import llama
from support.tuning_jobs import hasty
from transformers import TrainerCallback

from hf_helix import HelixConfig
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
        "figures": trainer.helix.diagnostics.figures,
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


def write_card(folder: str, helix: dict[str, Any], measure: bool = False, **card: Any) -> bool:
    """Train two steps and write a card, every rank into a folder of its own; whether this one has written."""
    own = Path(folder, os.environ["RANK"])
    model = {"num_hidden_layers": 5}  # enough for two ranks of a fold
    trainer = make_trainer(str(own), helix, model=model, training={"max_steps": 2, "gradient_accumulation_steps": 3})
    with hasty():
        trainer.train()
    if measure:
        trainer.measure_overlap(repeats=1)
    trainer.create_model_card(**card)
    return (own / "README.md").exists()


# -- the tests --------------------------------------------------------------------------------------------------------

CASE = {
    "model": {"num_hidden_layers": 2},
    "data": {"count": 40, "lengths": (16,)},
    "training": {"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 2},
}
RANKS = {"helix/slowest_rank", "helix/slowest_rank_share"}
"""Entries of runs with several steps, see test_slow_ranks.py."""

SPEED = {"helix/tokens_per_second", "helix/tflops_per_device"}


@pytest.mark.parametrize(
    ("helix", "model", "said"),
    [
        ({"tp_size": 2}, {}, "LlamaForCausalLM (declared) on tp 2; first plan greedy (plan=auto), CUDA graphs off"),
        (
            {"pp_size": 2, "recompute": "full"},
            {"num_hidden_layers": 4},
            "LlamaForCausalLM (declared) on pp 2, recompute=full; first plan greedy (plan=auto), schedule auto, "
            "CUDA graphs off",
        ),
    ],
    ids=["tp2", "pp2"],
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


def test_logs_of_a_real_training(cluster_of: Any, tmp_path: Path) -> None:
    """After tuning, in the same training; and what everything else logs is still there."""
    helix = {"tp_size": 2, "plan": "search", "cache": False}
    result = cluster_of(2).run(score, folder=str(tmp_path), helix=helix, trace=str(tmp_path / "trace.json"), **CASE)
    flops = token_flops(llama(num_hidden_layers=2)).causal(16)
    for rank in result:
        assert rank["plan"] == "search"
        assert len(rank["logs"]) == 2
        for entry in rank["logs"]:
            ours = {key for key in entry if key.startswith("helix/")} - RANKS
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
        assert {key for key in entry if key.startswith("helix/")} - RANKS == {"helix/overlapped_fraction"}
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


def test_a_trace_needs_a_window(cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).assert_raises(trace_untrained, "after train()", folder=str(tmp_path))


def test_ranks_that_see_other_tokens(cluster_of: Any, tmp_path: Path) -> None:
    """Each has a batch of its own: twice the tokens, no communication that a plan could order, sums of gradients."""
    path, options = tmp_path / "trace.json", {"tp_size": 1, "plan": "auto"}
    flops = token_flops(llama(num_hidden_layers=2)).causal(16)
    for rank in cluster_of(2).run(score, folder=str(tmp_path), helix=options, trace=str(path), **CASE):
        assert not any(key.startswith("helix/") for entry in rank["logs"] for key in entry)
        figures = rank["figures"]
        assert figures.keys() == SPEED
        each = figures["helix/tokens_per_second"] * flops / 2 / 1e12
        assert figures["helix/tflops_per_device"] == pytest.approx(each, rel=1e-4)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events if event["cat"] == "gradients"} == {1, 2}


# -- model cards: rank 0 writes, and what it says is of all of them ---------------------------------------------------


@pytest.mark.slow
def test_rank_0_writes_what_auto_measured(tmp_path: Path, cluster_of: Any):
    pytest.importorskip("bokeh")
    helix = {"tp_size": 2, "cache": False, "tuning_share": 1.0}
    assert cluster_of(2).run(write_card, folder=str(tmp_path), helix=helix) == [True, False]
    card = card_in(tmp_path / "0")
    result = cells(card)
    assert result["layout"] == "dp=1 tp=2 pp=1 cp=1 ep=1"
    assert result["ranks"].startswith("2 x CPU")
    assert result["batch"] == "6 sequences: 1 data-parallel x 3 micro-batches x 2"
    assert "timed, 20" in result["plan"]
    assert re.search(r"\n  sequential +[\d.,]+ ms ", card.text)
    fractions = r"\d+% of it ran .* \(overlapped \d+%\), (none|\d+%) of its time was saved \(hidden -?\d+%\)"
    assert re.fullmatch(fractions, result["communication"])
    for said in ("\n  overlapped ", "\n  hidden ", "  no plan can beat ", "- total_train_batch_size: 6\n"):
        assert card.text.count(said) == 1, card.text
    page = (tmp_path / "0" / "helix" / "page.html").read_text()
    assert card.text.count("[A page of the run](helix/page.html)") == 1
    assert "memory of rank 0 by part" in page
    assert "  overlapped " in page, "the measured scorecard"
    path = launch_file(card, tmp_path)
    assert HelixConfig.from_file(path) == HelixConfig(**helix)
    launch = load_config_from_file(str(path))
    assert (launch.num_processes, launch.distributed_type.value, launch.use_cpu) == (2, "MULTI_GPU", True)


def test_what_was_measured_by_hand_of_a_pipeline(tmp_path: Path, cluster_of: Any):
    helix = {"pp_size": 2, "plan": "greedy", "schedule": "dualpipe_v"}
    cluster_of(2).run(write_card, folder=str(tmp_path), helix=helix, measure=True, model_name="Piped")
    card = card_in(tmp_path / "0")
    assert cells(card)["schedule"] == "`dualpipe_v`"
    assert card.text.count("plan greedy: ") == 1
    assert "pipeline bubbles" in card.text
    assert cells(card)["communication"] == "no collectives to hide"
    assert HelixConfig.from_file(launch_file(card, tmp_path)) == HelixConfig(**helix)


def test_copies_count_in_the_batch(tmp_path: Path, cluster_of: Any):
    cluster_of(2).run(write_card, folder=str(tmp_path), helix={"plan": "greedy"})
    card = card_in(tmp_path / "0")
    assert cells(card)["layout"] == "dp=2 tp=1 pp=1 cp=1 ep=1"
    assert cells(card)["batch"] == "12 sequences: 2 data-parallel x 3 micro-batches x 2"
    assert "- total_train_batch_size: 12\n" in card.text
    assert cells(card)["communication"] == "overlap not measured"
