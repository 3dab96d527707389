"""Model cards of real trainers: the stock card, the tag, and a section that says what was measured and no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from huggingface_hub import ModelCard
from support.jobs import make_trainer

from hf_helix import HelixConfig

JOB = "support.card_jobs:write_card"


def trainer_in(folder: Path, **helix: Any) -> Any:
    return make_trainer(str(folder), helix, training={"max_steps": 1, "gradient_accumulation_steps": 2})


def card_in(folder: Path) -> Any:
    return ModelCard.load(folder / "README.md")


def cells(card: Any) -> dict[str, str]:
    """The first two columns of all tables; the first row of a name counts."""
    rows = [line.split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0].strip("|* "): row[1].strip("| ") for row in reversed(rows)}


def launch_file(card: Any, folder: Path) -> Path:
    """The YAML of a card, as a file."""
    path = folder / "launch.yaml"
    path.write_text(card.text.partition("```yaml\n")[2].partition("```")[0])
    return path


# One process


def test_nothing_is_claimed_that_was_not_measured(tmp_path: Path):
    trainer_in(tmp_path, plan="round_robin").create_model_card()
    card = card_in(tmp_path)
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["hf_helix", "generated_from_trainer"]
    found = cells(card)
    assert found["layout"] == "dp=1 tp=1 pp=1 cp=1 ep=1"
    assert found["plan"] == "`round_robin`, as given"
    assert found["communication"] == "overlap not measured"
    assert found["batch"] == "4 sequences: 1 data-parallel x 2 micro-batches x 2"
    assert "ms" not in card.text.partition("## Trained with hf_helix")[2]
    assert "was trained from scratch on" in card.text
    assert str(tmp_path) not in card.content


def test_the_plan_of_one_rank_is_not_said_to_be_measured(tmp_path: Path):
    trainer = trainer_in(tmp_path)
    trainer.train()
    trainer.create_model_card()
    assert cells(card_in(tmp_path))["plan"] == "`sequential`, by `auto` without measuring"


def test_arguments_reach_the_stock_card(tmp_path: Path):
    tags = ["first"]
    trainer_in(tmp_path).create_model_card("en", "mit", tags, "Little", finetuned_from="org/base")
    data = card_in(tmp_path).data
    assert (data.language, data.license, data.base_model) == (["en"], "mit", "org/base")
    assert data.tags == ["first", "hf_helix", "generated_from_trainer"]
    assert tags == ["first"]
    assert "# Little" in card_in(tmp_path).text
    with pytest.raises(TypeError, match="licence"):
        trainer_in(tmp_path).create_model_card(licence="mit")


@pytest.mark.parametrize("tags", ["hf_helix", ["hf_helix", "other"]])
def test_the_tag_stands_once(tags: Any, tmp_path: Path):
    trainer_in(tmp_path).create_model_card(tags=tags)
    assert card_in(tmp_path).data.tags.count("hf_helix") == 1


def test_a_second_card_replaces_the_first(tmp_path: Path):
    trainer = trainer_in(tmp_path)
    trainer.create_model_card(tags="mine")
    first = card_in(tmp_path).text
    trainer.create_model_card()
    assert card_in(tmp_path).text == first
    assert "mine" in card_in(tmp_path).data.tags


@pytest.mark.parametrize("base", ["org/base", ["org/one", "org/two"]])
def test_the_base_model_of_an_earlier_card_survives(base: Any, tmp_path: Path):
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump({'base_model': base})}---\n# By hand\n")
    trainer_in(tmp_path).create_model_card()
    card = card_in(tmp_path)
    assert card.data.base_model == base
    assert "hf_helix" in card.data.tags
    assert ("[org/base](https://huggingface.co/org/base)" in card.text) == (base == "org/base")


def test_the_base_model_that_was_loaded_or_given_comes_first(tmp_path: Path):
    (tmp_path / "README.md").write_text("---\nbase_model: org/earlier\n---\n")
    trainer = trainer_in(tmp_path)
    trainer.model.config.name_or_path = "org/loaded"
    trainer.create_model_card()
    assert card_in(tmp_path).data.base_model == "org/loaded"
    trainer.create_model_card(finetuned_from="org/given")
    assert card_in(tmp_path).data.base_model == "org/given"


def test_the_yaml_is_the_configuration_that_was_used(tmp_path: Path):
    options = {"plan": "greedy", "without": ("wgrad",), "cache": False, "cross_node": ("tp",)}
    trainer_in(tmp_path, **options).create_model_card()
    path = launch_file(card_in(tmp_path), tmp_path)
    assert HelixConfig.from_file(path) == HelixConfig(**options)
    assert load_config_from_file(str(path)).num_processes == 1


def test_a_file_is_named_without_its_folder(tmp_path: Path):
    trainer = trainer_in(tmp_path, plan="greedy")
    trainer.plan.save(tmp_path / "plan.json")
    trainer_in(tmp_path, plan=str(tmp_path / "plan.json")).create_model_card()
    card = card_in(tmp_path)
    assert cells(card)["plan"] == "`greedy`, from a file"
    assert "    plan: plan.json" in card.text
    assert str(tmp_path) not in card.content


def test_pushing_takes_the_card_along(tmp_path: Path):
    """The way of `push_to_hub`, up to the network."""
    trainer = trainer_in(tmp_path)
    trainer.model.model_tags = ["special"]
    trainer.hub_model_id = "org/little"
    with mock.patch("transformers.trainer.hf_api") as api:
        trainer.push_to_hub()
    assert api.return_value.upload_folder.call_args.kwargs["folder_path"] == str(tmp_path)
    card = card_in(tmp_path)
    assert {"special", "hf_helix"} <= set(card.data.tags)
    assert "## Trained with hf_helix" in card.text


# Two processes


@pytest.mark.slow
def test_rank_0_writes_what_auto_measured(tmp_path: Path, cluster_of: Any):
    helix = {"tp_size": 2, "cache": False, "tuning_share": 1.0}
    assert cluster_of(2).run(JOB, folder=str(tmp_path), helix=helix) == [True, False]
    card = card_in(tmp_path / "0")
    found = cells(card)
    assert found["layout"] == "dp=1 tp=2 pp=1 cp=1 ep=1"
    assert found["ranks"].startswith("2 x CPU")
    assert found["batch"] == "6 sequences: 1 data-parallel x 3 micro-batches x 2"
    assert "timed, 20" in found["plan"]
    assert found["sequential"].endswith(" ms")
    fractions = r"\d+% of it ran .* \(overlapped \d+%\), (none|\d+%) of its time was saved \(hidden -?\d+%\)"
    assert re.fullmatch(fractions, found["communication"])
    assert card.text.count("*instead:* data parallelism, if the model fits") == 1
    for said in ("  overlapped ", "  hidden ", "  no plan can beat ", "- total_train_batch_size: 6\n"):
        assert card.text.count(said) == 1, card.text
    path = launch_file(card, tmp_path)
    assert HelixConfig.from_file(path) == HelixConfig(**helix)
    launch = load_config_from_file(str(path))
    assert (launch.num_processes, launch.distributed_type.value, launch.use_cpu) == (2, "MULTI_GPU", True)


def test_what_was_measured_by_hand_of_a_pipeline(tmp_path: Path, cluster_of: Any):
    helix = {"pp_size": 2, "plan": "greedy", "schedule": "dualpipe_v"}
    cluster_of(2).run(JOB, folder=str(tmp_path), helix=helix, measure=True, model_name="Piped")
    card = card_in(tmp_path / "0")
    assert cells(card)["schedule"] == "`dualpipe_v`"
    assert card.text.count("plan greedy: ") == 1
    assert "pipeline bubbles" in card.text
    assert cells(card)["communication"] == "no collectives to hide"
    assert HelixConfig.from_file(launch_file(card, tmp_path)) == HelixConfig(**helix)


def test_copies_count_in_the_batch(tmp_path: Path, cluster_of: Any):
    cluster_of(2).run(JOB, folder=str(tmp_path), helix={"plan": "greedy"})
    card = card_in(tmp_path / "0")
    assert cells(card)["layout"] == "dp=2 tp=1 pp=1 cp=1 ep=1"
    assert cells(card)["batch"] == "12 sequences: 2 data-parallel x 3 micro-batches x 2"
    assert "- total_train_batch_size: 12\n" in card.text
    assert cells(card)["communication"] == "overlap not measured"
