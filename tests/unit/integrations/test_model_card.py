"""Model cards of real trainers: the stock card, the tag, and a section that says what was measured and no more."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from support.cards import card_in, cells, launch_file
from support.jobs import make_trainer

from hf_helix import HelixConfig


def trainer_in(folder: Path, **helix: Any) -> Any:
    return make_trainer(str(folder), helix, training={"max_steps": 1, "gradient_accumulation_steps": 2})


def test_nothing_is_claimed_that_was_not_measured(tmp_path: Path):
    trainer_in(tmp_path, plan="round_robin").create_model_card()
    card = card_in(tmp_path)
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["hf_helix", "generated_from_trainer"]
    result = cells(card)
    assert result["layout"] == "dp=1 tp=1 pp=1 cp=1 ep=1"
    assert result["plan"] == "`round_robin`, as given"
    assert result["communication"] == "overlap not measured"
    assert result["batch"] == "4 sequences: 1 data-parallel x 2 micro-batches x 2"
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


def test_a_second_card_replaces_the_first(tmp_path: Path):
    trainer = trainer_in(tmp_path)
    trainer.create_model_card(tags=["hf_helix", "mine"])
    first = card_in(tmp_path)
    trainer.create_model_card()
    assert card_in(tmp_path).text == first.text
    assert "mine" in card_in(tmp_path).data.tags
    assert first.data.tags.count("hf_helix") == 1


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
    options = {"plan": "greedy", "cache": False, "inter_node_axes": ("tp",)}
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
