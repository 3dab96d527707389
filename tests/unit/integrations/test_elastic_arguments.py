"""The training arguments, the order of the data and the checkpoint of a run whose ranks come and go."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models import arguments, llama, sequences
from support.resume_jobs import make
from trl import GRPOConfig

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.integrations.trainer.elastic import following

LAYOUTS = {"plan": "greedy", "layouts": {2: {"shard_optimizer": True}, 1: {}}}


def trained(folder: Path, resume: Any = None, helix: dict[str, Any] = LAYOUTS, **options: Any) -> Any:
    """A trainer of one rank, after its training: a step has four micro-batches, two on each of two ranks."""
    trainer = make(str(folder), helix, **{"data": {"count": 32}, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_accumulation_follows_and_the_users_arguments_stay(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), gradient_accumulation_steps=3)
    trainer = HelixTrainer(model=llama(), args=args, train_dataset=sequences(12), helix_config=HelixConfig(**LAYOUTS))
    assert (args.gradient_accumulation_steps, trainer.args.gradient_accumulation_steps) == (3, 6)
    assert trainer.helix_config == HelixConfig(plan="greedy")


def test_train_goes_on_by_itself_unless_it_is_told_otherwise(tmp_path: Path, capsys: Any) -> None:
    assert trained(tmp_path).state.global_step == 4
    assert "layouts for 2, 1 ranks: these 1 take one device, and 4 micro-batches in a step" in capsys.readouterr().out
    for resume, words in ((None, f"goes on from {tmp_path}/checkpoint-4"), (False, "")):
        trained(tmp_path, resume, training={"max_steps": 5})
        said = capsys.readouterr().out
        assert ("goes on from" in said) == bool(words)
        assert words in said
    trained(tmp_path, helix={"plan": "greedy"}, training={"gradient_accumulation_steps": 4})
    assert "goes on from" not in capsys.readouterr().out, "without layouts, as the stock Trainer"


def test_the_newest_whole_checkpoint_counts(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoint-4" / "scheduler.pt").write_bytes(b"")
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "helix_state.json").unlink()
    assert trained(tmp_path).state.global_step == 4
    assert f"goes on from {tmp_path}/checkpoint-2" in capsys.readouterr().out
    assert "checkpoint-4 is damaged: scheduler.pt has 0 bytes" in caplog.text
    assert "looking further" in caplog.text


def test_what_lies_in_the_folder_of_another_run_is_refused_with_a_way_out(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(
        ValueError, match=r"saved from another model.*with layouts, train\(resume_from_checkpoint=False\)"
    ):
        trained(tmp_path, model={"num_hidden_layers": 2})
    trained(tmp_path, False, model={"num_hidden_layers": 2})


def test_a_run_that_no_restart_could_go_on_with_says_so(tmp_path: Path, capsys: Any) -> None:
    for training in ({"save_strategy": "no"}, {"save_only_model": True}):
        trained(tmp_path, training={"max_steps": 2, **training})
        assert "layouts without checkpoints to go on from: a restart begins anew" in capsys.readouterr().out
    assert trained(tmp_path, training={"max_steps": 2}).state.global_step == 2, "the model alone is passed over"


def test_groups_by_length_stay_what_they_are_on_the_most_ranks(tmp_path: Path) -> None:
    """The order of the data is that of two ranks, with 2 micro-batches each."""
    grouped = {"train_sampling_strategy": "group_by_length"}
    data = {"count": 32, "lengths": (5, 9, 17), "padding": "right"}
    trainer = trained(tmp_path, training=grouped, data=data)
    assert trainer._get_train_sampler().batch_size == 2 * 2
    assert json.loads((tmp_path / "checkpoint-4" / "helix_state.json").read_text())["group"] == 4
    without = {"helix": {"plan": "greedy"}, "data": data}
    with pytest.raises(
        ValueError, match=r"ordered the data by groups of 4 samples .* by groups of 8 samples .*as `layouts`"
    ):
        trained(tmp_path, True, training={**grouped, "gradient_accumulation_steps": 4}, **without)


def test_epochs_have_as_many_steps_on_every_number_of_ranks(tmp_path: Path) -> None:
    training = {"dataloader_drop_last": True}
    with pytest.raises(ValueError, match=r"an epoch of 35 samples has .*\(4 on 2 ranks, 5 on 1 ranks\).*multiple of 8"):
        make(str(tmp_path), LAYOUTS, data={"count": 35}, training=training)
    make(str(tmp_path), LAYOUTS, data={"count": 32}, training=training)


def test_every_layout_is_compared_with_the_model_at_the_first_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layouts: 3: tp_size=3"):
        make(str(tmp_path), {"plan": "greedy", "layouts": {3: {"tp_size": 3}, 1: {}}})


def test_generations_grow_with_the_step(tmp_path: Path) -> None:
    given = HelixConfig(**LAYOUTS)
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_accumulation_steps=2, num_generations=4)
    followed = following(args, given)
    assert (args.steps_per_generation, followed.steps_per_generation) == (2, 4)
    assert followed.generation_batch_size == 2 * args.generation_batch_size
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, steps_per_generation=4, num_generations=4)
    with pytest.raises(ValueError, match=r"layouts with steps_per_generation=4 and gradient_accumulation_steps=1"):
        following(args, given)


def test_accumulation_given_to_accelerate_is_refused(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}})
    with pytest.raises(ValueError, match=r"num_steps.*the number follows the ranks; use gradient_accumulation_steps"):
        following(args, HelixConfig(**LAYOUTS))
