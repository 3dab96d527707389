"""Options: nothing wrong is accepted, errors name what works, and the places they are read from have an order."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import yaml

from hf_helix.config import PLANS, RECOMPUTE, SCHEDULES, HelixConfig
from hf_helix.integrations.accelerate import launcher
from hf_helix.integrations.accelerate.launcher import (
    CONFIG_FILE_VARIABLE,
    config_file_of,
    launcher_config_file,
    resolve_config,
)
from hf_helix.planning.schedule.placement import FOLD, LINEAR, split_layers, stage_ranks
from hf_helix.runtime.distributed.mesh import check_world

SIZES = ("tp_size", "pp_size", "cp_size", "ep_size")
UNREAL = 1, 0, "yes", None, []


@pytest.fixture(autouse=True)
def given_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(launcher, "launcher_config_file", lambda: None)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# -- values ----------------------------------------------------------------------------------------------------------


def test_what_follows_from_options() -> None:
    ranks = [({"tp_size": 3, "pp_size": 2}, 6), ({"cp_size": 2}, 2), ({"ep_size": 2}, 1)]
    assert [HelixConfig(**sizes).ranks_per_batch for sizes, _ in ranks] == [count for _, count in ranks]
    assert HelixConfig(ep_size=2).communicates
    assert not HelixConfig().communicates
    zero = [{}, {"shard_optimizer": True, "ep_size": 2}, {"shard_parameters": True}]
    assert [HelixConfig(**options).zero_stage for options in zero] == [0, 1, 3]
    for name, values in (
        ("plan", PLANS),
        ("schedule", SCHEDULES),
        ("recompute", (None, *RECOMPUTE)),
        ("expert_capacity_factor", (1, 1.25, 8.0)),
        ("tuning_share", (0, 0.5, 1)),
    ):
        assert tuple(getattr(HelixConfig(**{name: value}), name) for value in values) == values


@pytest.mark.parametrize("name", ["plan", "schedule", "profile"])
def test_an_option_may_be_an_existing_file_but_not_a_folder(name: str, tmp_path: Path) -> None:
    path = str(write(tmp_path / "file", "{}"))
    assert getattr(HelixConfig(**{name: path}), name) == path
    with pytest.raises(ValueError, match=r"(neither a (rule|schedule) nor|is not) an existing file"):
        HelixConfig(**{name: str(tmp_path)})


def test_layers_per_stage_are_taken_as_a_tuple_or_a_list() -> None:
    config = HelixConfig(pp_size=2, layers_per_stage=[3, 2, 2, 3])
    assert config.layers_per_stage == (3, 2, 2, 3)
    assert hash(config) == hash(HelixConfig(pp_size=2, layers_per_stage=(3, 2, 2, 3)))
    given = HelixConfig(tp_size=2, inter_node_axes=("tp",))
    assert copy.deepcopy(given) == pickle.loads(pickle.dumps(given)) == given


REFUSED: list[tuple[str, tuple[object, ...], type[Exception], str]] = [
    *(
        (name, (2.0, "2", None, True, False, [2]), TypeError, f"^{name} must be a whole number, such as {name}=1; got ")
        for name in SIZES
    ),
    *((name, (0, -2), ValueError, rf"^{name} must be at least 1, such as {name}=1; got (0|-2)$") for name in SIZES),
    *(
        (name, (None, 1, True, "", Path("plan.json")), TypeError, f"^{name} must be a string, such as {name}='auto'; ")
        for name in ("plan", "schedule", "reduce_gradients")
    ),
    *(
        (name, UNREAL, TypeError, f"^{name} must be true or false, such as {name}=True; got ")
        for name in ("cache", "shard_optimizer")
    ),
    ("cuda_graphs", (1, None, 0.0), TypeError, "^cuda_graphs must be 'auto', true or false, such as cuda_graphs='a"),
    ("cuda_graphs", ("autp", "True"), ValueError, "^cuda_graphs='.*' is unknown; use cuda_graphs='auto', true or fal"),
    ("expert_capacity_factor", (0.5, 0, -1.0, float("nan")), ValueError, r"=.* leaves less room.*use 1\.0 or more"),
    ("expert_capacity_factor", ("1.25", True, [1.0]), TypeError, r" must be a number, such as 1\.25, or None"),
    ("cp_method", ("rings",), ValueError, r"='rings' is unknown; use one of ring, all_gather \(did you mean 'ring"),
    ("cp_recurrence", ("state",), ValueError, r"='state' is unknown; use one of heads, states \(did you mean 'states"),
    ("offload", ("optimiser",), ValueError, r"='optimiser' is unknown; use one of optimizer, parameters \(did you"),
    ("reduce_gradients", ("windows",), ValueError, r"='windows' is unknown; use one of auto, window, .*mean 'window'"),
    ("reduce_gradients", ("microbatch",), ValueError, r"='microbatch' without shard_parameters=True: .* add shard_p"),
    ("offload", (True,), TypeError, r" must be a string, such as offload='optimizer', or None; got True"),
    ("inter_node_axes", (("pp",),), ValueError, "inter_node_axes='pp' is no axis; use some of tp, cp, ep, dp"),
    ("inter_node_axes", ("cp",), TypeError, r" must be a list, such as inter_node_axes=\['cp'\], or None; got 'cp'"),
    ("tuning_share", (-0.1, 5), ValueError, r".* a number from 0 to 1, such as 0\.05"),
    ("tuning_share", ("5%", True), TypeError, r".* a number from 0 to 1, such as 0\.05"),
    ("recompute", ("ful", True, "", 1), ValueError, r"=.* is unknown; use one of none, selective, full"),
    ("plan", ("gredy",), ValueError, r"='gredy' is neither a rule nor an existing file; .*did you mean 'greedy'"),
    ("plan", ("xyz.json",), ValueError, r".*rules: auto, search, greedy, dhelix, round_robin, sequential"),
    (
        "plan",
        ("intra_batch",),
        ValueError,
        r"='intra_batch' has become a benchmark: .*benchmarks.paper.*; use one of auto",
    ),
    ("schedule", ("v",), ValueError, r"='v' is neither .*; schedules: auto, folded_1f1b, dualpipe_v, 1f1b$"),
    ("schedule", ("dualpipev",), ValueError, r".*did you mean 'dualpipe_v'"),
    ("profile", (True, 5, "absent.json", ""), ValueError, r"=.*hf-helix profile.*, or use profile=None"),
    ("layers_per_stage", (2, "2,2", [2, "2"], [True]), TypeError, "^layers_per_stage must be a list of .*; got "),
    ("tp", (2,), TypeError, r"HelixConfig: unknown option 'tp' \(did you mean 'tp_size'\?\)"),
    ("tp_sise", (2,), TypeError, r"HelixConfig: unknown option 'tp_sise' \(did you mean 'tp_size'\?\)"),
]


def test_what_the_host_holds_goes_with_few_options_less() -> None:
    for options, words in (
        ({"offload": "parameters", "shard_optimizer": True}, "use shard_parameters=True, or shard_optimizer=False"),
        ({"offload": "parameters", "cuda_graphs": True}, "use cuda_graphs=False"),
        ({"recompute": "offload", "cuda_graphs": True}, "^recompute='offload' with cuda_graphs=True: .*; use cuda"),
    ):
        with pytest.raises(ValueError, match=words):
            HelixConfig(**options)


@pytest.mark.parametrize(("name", "values", "error", "words"), REFUSED)
def test_values_that_are_refused(name: str, values: tuple[object, ...], error: type[Exception], words: str) -> None:
    for value in values:
        with pytest.raises(error, match=words if name in words else name + words) as caught:
            HelixConfig(**{name: value})
        said = str(caught.value)
        assert not words.startswith("=") or said.startswith(f"{name}={value!r}")
        assert not words.endswith("got ") or name == "layers_per_stage" or said.endswith(repr(value))


# -- mappings and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tpsize": 2}, ValueError, r"unknown option 'tpsize' \(did you mean 'tp_size'\?\); known: tp_size, "),
        ({1: 2}, ValueError, "unknown option 1; known: "),
        *((other, TypeError, "expected options such as 'tp_size: 2', got ") for other in (None, 2, "tp: 2", ["tp"])),
        ({"tp_size": "2"}, TypeError, "tp_size"),
    ],
)
def test_a_wrong_mapping_says_where_it_came_from(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^here: {words}"):
        HelixConfig.from_mapping(options, "here")


BLOCK = {"tp_size": 2, "plan": "greedy"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp_size: 2\nplan: greedy\n", BLOCK),
        ('{"tp_size": 2, "plan": "greedy"}', BLOCK),
        ("mixed_precision: 'no'\nparallelism_config:\n  helix:\n    tp_size: 2\n    plan: greedy\n", BLOCK),
        ("inter_node_axes: [tp, cp]\ncache: no\n", {"inter_node_axes": ("tp", "cp"), "cache": False}),
        (
            "pp_size: 2\nschedule: dualpipe_v\nlayers_per_stage: [2, 1, 1, 2]\nshard_optimizer: true\n",
            {"pp_size": 2, "schedule": "dualpipe_v", "layers_per_stage": (2, 1, 1, 2), "shard_optimizer": True},
        ),
    ],
)
def test_files(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert HelixConfig.from_file(write(tmp_path / "helix.yaml", text)) == HelixConfig(**expected)
    assert HelixConfig.from_file(str(write(tmp_path / "helix.json", text))) == HelixConfig(**expected)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("parallelism_config: {helix: {tp_sise: 2}}", ValueError, "unknown option 'tp_sise'"),
        ("parallelism_config: {helix: 2}", TypeError, "expected options such as"),
        ("parallelism_config: {tp_size: 2}", ValueError, "unknown option 'parallelism_config'"),
        ("parallelism_config:\n  helix:\n", TypeError, "expected options such as 'tp_size: 2', got None"),
        ("tp_size: 4\nparallelism_config: {helix: {tp_size: 2}}", ValueError, "tp_size stands beside the helix block"),
        ("tp_size: yes", TypeError, "tp_size must be a whole number"),
        ("- tp_size", TypeError, "expected options such as"),
        ("tp_size: [2", ValueError, "is not valid YAML"),
        ("profile: absent.json", ValueError, "profile='absent.json' is not an existing file"),
    ],
)
def test_a_wrong_file_is_named_with_its_error(tmp_path: Path, text: str, error: type[Exception], words: str) -> None:
    path = write(tmp_path / "helix.yaml", text)
    with pytest.raises(error, match=words) as caught:
        HelixConfig.from_file(path)
    assert "not valid YAML" in words or str(caught.value).startswith(f"{path}: ")
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the configuration file .*absent\.yaml"):
        HelixConfig.from_file(tmp_path / "absent.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"bytes\.yaml"):
        HelixConfig.from_file(tmp_path / "bytes.yaml")


# -- precedence ------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(given_nowhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the launcher, which asks for two tensor-parallel ranks."""
    path = write(tmp_path / "launch.yaml", "parallelism_config: {helix: {tp_size: 2}}")
    monkeypatch.setattr(launcher, "launcher_config_file", lambda: path)
    return path


def test_argument_before_plugin_before_environment_before_launcher(
    launched: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argument, plugin = HelixConfig(tp_size=5), HelixConfig(tp_size=4)
    for value, expected in (("", 2), (str(write(tmp_path / "helix.yaml", "tp_size: 3")), 3)):
        monkeypatch.setenv(CONFIG_FILE_VARIABLE, value)
        assert resolve_config(None, None).tp_size == expected
    assert resolve_config(None, plugin) is plugin
    assert resolve_config(argument, plugin) is argument
    assert resolve_config(argument, None) is argument
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(ValueError, match=r"absent\.yaml"):  # and does not fall through to a lower place
        resolve_config(None, None)
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, "")
    launched.write_text("parallelism_config: {helix: {tp: 2}}")
    with pytest.raises(ValueError, match=r"launch\.yaml: unknown option 'tp'"):
        resolve_config(None, None)


@pytest.mark.parametrize("text", ["", "num_processes: 2\nparallelism_config: {parallelism_config_cp_backend: torch}"])
def test_given_nowhere_shows_every_way(text: str, launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched.write_text(text)
    if not text:
        monkeypatch.setattr(launcher, "launcher_config_file", lambda: None)
    with pytest.raises(ValueError, match="no helix options were given") as error:
        resolve_config(None, None)
    ways = (
        "HelixTrainer(..., helix_config=HelixConfig(",
        "TrainingArguments(..., parallelism_config=HelixPlugin(",
        "HELIX_CONFIG_FILE=",
        "accelerate launch --config_file",
    )
    assert [way for way in ways if way not in str(error.value)] == []
    assert "helix_config=HelixConfig(tp_size=2)" in str(error.value).splitlines()[0]
    assert not text or "launch.yaml has parallelism_config without" in str(error.value)


@pytest.mark.parametrize("wrong", [{"tp_size": 2}, "helix.yaml", 2])
def test_only_a_config_is_a_config(wrong: Any) -> None:
    for arguments in ((wrong, None), (None, wrong)):
        with pytest.raises(TypeError, match="must be a HelixConfig, got "):
            resolve_config(*arguments)


# -- the launcher ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("accelerate launch --config_file X.yaml s.py", "X.yaml"),
        ("accelerate launch --config-file X.yaml s.py", "X.yaml"),
        ("accelerate launch --num_processes 2 --config_file X.yaml s.py --lr 1", "X.yaml"),
        ("accelerate-launch --config_file X.yaml s.py", "X.yaml"),
        ("python -u -m accelerate.commands.launch --config_file X.yaml s.py", "X.yaml"),
        ("/usr/bin/python3 /venv/bin/accelerate launch --config_file X.yaml s.py", "X.yaml"),
        ("/usr/bin/python3 /venv/bin/accelerate-launch --config_file=X.yaml s.py", "X.yaml"),
        ("/usr/bin/python3 /site-packages/accelerate/commands/launch.py --config_file X.yaml s.py", "X.yaml"),
        ("", None),
        ("python script.py --config_file X.yaml", None),
        ("torchrun --nproc_per_node 2 script.py --config_file X.yaml", None),
        ("python script.py --backend accelerate --config_file X.yaml", None),
        ("accelerate launch s.py", None),
        ("accelerate launch --config_file", None),
        ("accelerate launch --deepspeed_config_file X.yaml s.py", None),
        ("accelerate launch --cpu s.py --config_file own.ini", None),
    ],
)
def test_only_the_launchers_own_option_counts(command: str, file: str | None) -> None:
    assert config_file_of(command.split()) == file


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (("python -m accelerate.commands.launch --config_file X.yaml s.py",), "/work/X.yaml"),
        (("sh -c x", None, "accelerate launch --config_file /etc/X.yaml s.py"), "/etc/X.yaml"),
        (("bash", "python script.py --config_file X.yaml"), None),
        ((), None),
    ],
)
def test_the_launcher_is_looked_for_among_the_parents(
    monkeypatch: pytest.MonkeyPatch, tree: tuple[str | None, ...], path: str | None
) -> None:
    """This process, its parent and so on, each a command line or None for one that may not be read."""

    def process_of(command: str | None) -> Any:
        given = {"side_effect": psutil.AccessDenied} if command is None else {"return_value": command.split()}
        return mock.Mock(cmdline=mock.Mock(**given), cwd=lambda: "/work")

    this = mock.Mock(parents=lambda: list(map(process_of, tree)))
    monkeypatch.setattr("psutil.Process", lambda: this)
    assert launcher_config_file() == (path and Path(path))


# -- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [FOLD, LINEAR])
def test_the_split_that_an_error_suggests_is_taken(placement: str) -> None:
    num_ranks = 3
    ranks = stage_ranks(placement, num_ranks)
    with pytest.raises(ValueError, match="such as layers_per_stage=") as caught:
        split_layers(13, ranks, head_cost=1.5, layers_per_stage=[13])
    suggested = yaml.safe_load(str(caught.value).rpartition("layers_per_stage=")[2])
    HelixConfig(pp_size=num_ranks, layers_per_stage=suggested)
    stages = split_layers(13, ranks, layers_per_stage=suggested)
    assert [len(stage) for stage in stages] == suggested


@pytest.mark.parametrize(
    ("world", "tp", "pp", "message"),
    [
        (4, 1, 3, "pp_size=3 must divide the world size, 4 processes; values that work: 1, 2, 4"),
        (6, 2, 2, "pp_size=2 must divide the 3 processes that tp_size=2 leaves of 6; values that work: 1, 3"),
        (1, 1, 2, "pp_size=2 must divide the world size, 1 process; values that work: 1"),
    ],
)
def test_worlds_that_do_not_divide(world: int, tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match="must divide") as caught:
        check_world(world, tp, pp)
    assert message in str(caught.value)
    assert ("accelerate launch --num_processes N" in str(caught.value)) == (world == 1)
