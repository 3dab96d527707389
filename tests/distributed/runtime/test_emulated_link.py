"""Training over an emulated link: the same bits as without one, every byte accounted for, and everything says so."""

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import make_trainer
from support.pipeline_jobs import window_of
from support.tuning_jobs import hasty

from hf_helix.config import parse_link
from hf_helix.measure.overlap import transports
from hf_helix.operators.communication.transport import Recorder
from hf_helix.report.comparison import format_comparison
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.runner import forget_gradients
from hf_helix.tuning.result_text import format_scorecard

# What the ranks run


def model_of(helix: dict[str, Any]) -> dict[str, int]:
    return {"num_hidden_layers": 2 * helix.get("pp_size", 1)}


@plain_parameters()
def windows(folder: str, helix: dict[str, Any], link: str) -> dict[str, Any]:
    """The same window without a link and with one: losses, gradients, and what a recorder and the link count."""
    result: dict[str, Any] = {}
    for name in (None, link):
        trainer = make_trainer(folder, {**helix, "plan": "greedy", "link": name}, model=model_of(helix))
        trainer.model.train()
        window, runner, mesh = window_of(trainer, 3, 2, (17,)), trainer.helix.runner, trainer.helix.mesh
        start = time.perf_counter()
        losses = runner.train_window(window)
        seconds = time.perf_counter() - start
        gradients = [parameter.grad.clone() for parameter in runner.rank_units.own_rows if parameter.grad is not None]
        forget_gradients(runner)
        result[str(name)] = {"losses": torch.stack(losses), "gradients": gradients, "seconds": seconds}
        if mesh.link is not None:
            with_sums = mesh.link.out.bytes
            recorders = [Recorder(axis.transport) for axis in mesh.axes]
            with transports(mesh.axes, recorders):
                runner.train_window(window, complete=False)
            forget_gradients(runner)
            result |= {
                "link": mesh.link.out.bytes - with_sums,
                "sums": 2 * with_sums - mesh.link.out.bytes,
                "recorded": sum(recorder.bytes_sent for recorder in recorders),
                "tokens": sum(batch.num_tokens for batch in window),
                "parameters": sum(parameter.nbytes for parameter in runner.rank_units.own_rows),
                "hidden": trainer.model.config.hidden_size,
            }
        trainer.helix.close()
    bare, linked = result.pop("None"), result.pop(link)
    result["same_losses"] = torch.equal(bare["losses"], linked["losses"])
    result["same_gradients"] = all(map(torch.equal, bare["gradients"], linked["gradients"]))
    return {**result, "seconds": linked["seconds"], "num_gradients": len(linked["gradients"])}


CASE: dict[str, Any] = {
    "model": {"num_hidden_layers": 2},
    "training": {"max_steps": 2, "gradient_accumulation_steps": 2},
}


def on_an_even_link(folder: str) -> dict[str, Any]:
    """Train on an even link, compare plans; what was measured, and everything that was said."""
    helix = {"tp_size": 2, "plan": "greedy", "link": "even", "cache": False}
    trainer = make_trainer(folder, helix, **CASE)
    said = io.StringIO()
    with hasty(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()
        compared = trainer.compare_plans(["sequential"], repeats=1)
    trainer.create_model_card()
    card = Path(folder, "README.md")
    return {
        "rate": trainer.helix.mesh.link.rate,
        "said": said.getvalue(),
        "table": format_comparison(compared),
        "scorecard": format_scorecard(compared.overlaps["greedy"], "greedy"),
        "card": card.read_text() if trainer.is_world_process_zero() else "",
        "about": dict(compared.profile.about),
        "steps": {rule: overlap.step for rule, overlap in compared.overlaps.items()},
        "bare": dict(compared.bare),
    }


# Tests

LINK = "20mbit,0.1ms"


@pytest.mark.parametrize("helix", [{"tp_size": 2}, {"pp_size": 2}, {}], ids=["tp2", "pp2", "dp2"])
def test_a_window_has_the_same_bits_and_every_byte_takes_its_time(cluster_of: Any, tmp_path: Path, helix: Any):
    for result in cluster_of(2).run(windows, folder=str(tmp_path), helix=helix, link=LINK):
        assert result["same_losses"]
        assert result["same_gradients"]
        assert result["num_gradients"] > 10
        if "pp_size" in helix:  # every micro-batch goes out once and its gradient comes back once, in fp32
            assert (result["link"], result["recorded"]) == (2 * 4 * result["tokens"] * result["hidden"], 0)
        else:
            assert result["link"] == result["recorded"]
        if not helix:  # all of it is the sum of gradients: a ring of two sends each once
            assert (result["link"], result["sums"]) == (0, result["parameters"])
        sent = result["link"] + result["sums"]
        assert sent > 0
        assert result["seconds"] >= 8 * sent / parse_link(LINK).rate


def test_an_even_link_is_found_agreed_and_said(cluster_of: Any, tmp_path: Path):
    first, second = cluster_of(2).run(on_an_even_link, folder=str(tmp_path))
    assert first["rate"] == second["rate"] > 0
    said = f"hf_helix: emulated link: {str_of(first['rate'])} (even)"
    assert first["said"].count(said) == 1
    assert "emulated link" not in second["said"]
    assert parse_link(first["about"]["emulated_link"]).rate == first["rate"]
    # Everything that is printed says that the link is emulated.
    for text in (first["table"], first["scorecard"], first["card"]):
        assert f"emulated link of {str_of(first['rate'])} (even)" in text
    assert "without the emulated link, measured: sequential" in first["table"]
    assert set(first["bare"]) == set(first["steps"]) == {"sequential", "greedy"}


def str_of(rate: float) -> str:
    return str(parse_link(f"{rate / 1e6}mbit"))
