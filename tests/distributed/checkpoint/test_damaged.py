"""Every damaged file of a checkpoint is named in the first line, with the checkpoint to go on from; none runs code."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.marks import slow
from support.resume_jobs import make, run

from hf_helix.checkpoint.plain_files import DamagedFile, fits, read_metadata, read_torch
from hf_helix.checkpoint.training_state import load_states, save_states
from hf_helix.checkpoint.whole import check_whole, with_remedy
from hf_helix.planning.parameters import Parameter, Part

JOB = "support.resume_jobs:"
GREEDY = {"plan": "greedy"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints by one process, in one folder."""
    folder = tmp_path_factory.mktemp("saved")
    run(str(folder), GREEDY, training={"max_steps": 2, "save_steps": 1})
    return folder


# -- damaged files -----------------------------------------------------------------------------------------------------

JSON = ("config.json", "generation_config.json", "trainer_state.json", "helix_state.json")
OF_TORCH = ("scheduler.pt", "helix_rng_0.pt", "optimizer/.metadata")
WEIGHTS, STATES = "model.safetensors", "optimizer/__0_0.distcp"
UNREAD = {"training_args.bin"}  # by no run that resumes


def of_another_type(path: Path) -> bytes:
    """What its format allows and a checkpoint never has."""
    if path.suffix == ".json":
        return b"[1, 2]"
    if path.name == ".metadata":
        return pickle.dumps({"state_dict_metadata": 1})
    buffer = io.BytesIO()
    torch.save([torch.ones(3)], buffer)
    return buffer.getvalue()


DAMAGES: dict[str, Callable[[Path], bytes]] = {
    "short": lambda path: path.read_bytes()[: path.stat().st_size // 2],
    "empty": lambda path: b"",
    "other": lambda path: bytes(reversed(path.read_bytes())),
    "type": of_another_type,
}


def damaged(folder: Path, name: str, damage: str) -> Path:
    """Damages a file of a checkpoint; where the manifest has its size, it has the new one."""
    path = folder / name
    content = DAMAGES[damage](path)
    manifest = folder / "helix_state.json"
    text = manifest.read_text().replace(f'"{name}": {path.stat().st_size}', f'"{name}": {len(content)}')
    manifest.write_text(text)
    path.write_bytes(content)
    return path


def assert_named(error: BaseException, path: Path, folder: Path) -> None:
    first = str(error).splitlines()[0]
    assert str(path) in first
    assert f"trainer.train(resume_from_checkpoint='{folder / 'checkpoint-1'}')" in first
    assert "weights_only" not in str(error)


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_file_is_named_with_the_checkpoint_to_go_on_from(damage: str, saved: Path, tmp_path: Path) -> None:
    """All sizes are those of the manifest, which would name the file otherwise."""
    names = {str(path.relative_to(saved / "checkpoint-2")) for path in (saved / "checkpoint-2").rglob("*.*")}
    assert names == {*JSON, *OF_TORCH, WEIGHTS, STATES} | UNREAD, "a file that this test does not know"
    for name in (*JSON, *OF_TORCH, WEIGHTS):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(saved, folder)
        path = damaged(folder / "checkpoint-2", name, damage)
        with pytest.raises(ValueError, match="newest whole one") as raised, with_remedy(folder / "checkpoint-2"):
            check_whole(folder / "checkpoint-2")
        assert_named(raised.value, path, folder)


@pytest.mark.parametrize("damage", ["type", *(slow(damage) for damage in ("short", "empty", "other"))])
def test_states_are_named_when_they_are_read(damage: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = damaged(tmp_path / "checkpoint-2", STATES, damage)
    trainer = make(str(tmp_path), GREEDY)
    with pytest.raises(ValueError, match="newest whole one") as raised:
        trainer.train(resume_from_checkpoint=True)
    assert_named(raised.value, path, tmp_path)


def test_every_rank_names_the_newest_whole_checkpoint(saved: Path, cluster_of: Any, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = damaged(tmp_path / "checkpoint-2", "trainer_state.json", "short")
    words = (str(path), "cut short", f"resume_from_checkpoint='{tmp_path / 'checkpoint-1'}'")
    cluster_of(2).assert_raises(f"{JOB}run", *words, folder=str(tmp_path), helix={"tp_size": 2}, resume=True)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("helix_state.json", '"tp": 1', '"tp": "1"', "'layout' should be dict[str, int]"),
        ("helix_state.json", '"trained": true', '"trained": "yes"', "'trained' should be bool, and is 'yes'"),
        ("helix_state.json", '"samples"', '"sample"', "it has no 'samples'"),
        ("trainer_state.json", '"global_step": 2', '"global_step": "2"', "'global_step' should be int, and is '2'"),
        ("trainer_state.json", '"global_step"', '"steps": 1, "global_step"', "unexpected keyword argument 'steps'"),
    ],
)
def test_fields_of_other_types(name: str, old: str, new: str, words: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoint-2", tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DamagedFile) as raised:
        check_whole(tmp_path)
    assert words in str(raised.value)
    assert str(path) in str(raised.value)


def test_types_of_fields() -> None:
    assert fits({"a": [1, 2]}, dict[str, list[int]])
    assert fits(3, float | None)
    assert fits(None, float | None)
    assert not fits(True, int)
    assert not fits({"a": [1, "2"]}, dict[str, list[int]])
    assert not fits({1: 2}, dict[str, int])


# -- files that would run code -----------------------------------------------------------------------------------------


class Marker:
    """Leaves a file behind where it is made by a reader that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def with_option(folder: Path, value: Any) -> None:
    """Saves states of which an option of a parameter group is the value."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [weight], "mine": value}])
    part = Part(Parameter("weight", (2,)))
    save_states(optimizer, {weight: part}, folder)
    del optimizer.param_groups[0]["mine"]
    load_states(optimizer, {weight: part}, folder)


def in_metadata(folder: Path, value: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": value}))
    read_metadata(folder)


def in_file(folder: Path, value: Any) -> None:
    torch.save({"now": value}, folder / "scheduler.pt")
    read_torch(folder / "scheduler.pt")


@pytest.mark.parametrize(
    ("read", "name"), [(with_option, "__0_0.distcp"), (in_metadata, ".metadata"), (in_file, "scheduler.pt")]
)
def test_no_file_runs_code(read: Callable[[Path, Any], None], name: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedFile) as raised:
        read(tmp_path, Marker(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()
    assert f"{tmp_path / name} is not read: it asks for" in str(raised.value)
    assert "mkdir" in str(raised.value)
    assert "weights_only" not in str(raised.value)


def test_numbers_of_numpy_among_options_are_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with_option(tmp_path, (numpy.float64(0.5), [numpy.int64(3)]))


def test_a_file_outside_of_the_folder_is_no_part_of_it(tmp_path: Path) -> None:
    save_states(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), {}, tmp_path)
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../__0.distc"))
    with pytest.raises(DamagedFile, match="no part of a file of this folder"):
        read_metadata(tmp_path)


def test_weights_of_another_kind_are_still_refused_by_shape(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint-2" / WEIGHTS
    before = path.stat().st_size
    save_file({"other": torch.ones(3)}, path)
    manifest = tmp_path / "checkpoint-2" / "helix_state.json"
    manifest.write_text(manifest.read_text().replace(f'"{WEIGHTS}": {before}', f'"{WEIGHTS}": {path.stat().st_size}'))
    with pytest.raises(ValueError, match="do not fit this LlamaForCausalLM"):
        make(str(tmp_path), GREEDY).train(resume_from_checkpoint=True)
