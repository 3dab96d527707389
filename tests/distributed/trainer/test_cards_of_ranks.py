"""Model cards of trainings on two ranks: rank 0 writes, and what it says is of all of them."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from support.cards import card_in, cells, launch_file
from support.jobs import make_trainer
from support.tuning_jobs import hasty

from hf_helix import HelixConfig


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
