"""Options: nothing wrong is accepted, errors name what works, and the places they are read from have an order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hf_helix.config import PLANS, RECOMPUTE, SCHEDULES, HelixConfig
from hf_helix.integrations.accelerate import launcher
from hf_helix.integrations.accelerate.launcher import (
    CONFIG_FILE_VARIABLE,
    config_file_of,
    launcher_config_file,
    resolve_config,
)

SIZES = ("tp_size", "pp_size", "cp_size", "ep_size")


@pytest.fixture(autouse=True)
def given_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(launcher, "launcher_config_file", lambda: None)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Values


def test_the_defaults_are_one_rank_and_auto():
    assert dataclasses.asdict(HelixConfig()) == {
        **dict.fromkeys(SIZES, 1),
        "plan": "auto",
        "tuning_share": 0.05,
        "schedule": "auto",
        "profile": None,
        "compile": False,
        "cuda_graphs": False,
        "cache": True,
        "layers_per_stage": None,
        "shard_optimizer": False,
        "shard_parameters": False,
        "cp_method": "ring",
        "expert_capacity_factor": None,
        "inter_node_axes": None,
        "recompute": None,
        "link": None,
    }


def test_ranks_per_batch():
    assert HelixConfig(tp_size=3).ranks_per_batch == 3
    assert HelixConfig(tp_size=3, pp_size=2).ranks_per_batch == 6
    assert HelixConfig(ep_size=2).ranks_per_batch == 1
    assert HelixConfig(ep_size=2).communicates
    assert not HelixConfig().communicates


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [2.0, "2", None, True, False, [2]])
def test_a_size_that_is_no_whole_number_is_refused(name: str, value: object):
    with pytest.raises(TypeError, match=f"^{name} must be a whole number, such as {name}=1; got ") as error:
        HelixConfig(**{name: value})
    assert str(error.value).endswith(repr(value))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -2])
def test_a_size_below_one_is_refused(name: str, value: int):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, such as {name}=1; got {value}$"):
        HelixConfig(**{name: value})


@pytest.mark.parametrize("name", ["plan", "schedule"])
@pytest.mark.parametrize("value", [None, 1, True, "", Path("plan.json")])
def test_a_name_that_is_no_text_is_refused(name: str, value: object):
    with pytest.raises(TypeError, match=f"^{name} must be a string, such as {name}='auto'; got "):
        HelixConfig(**{name: value})


@pytest.mark.parametrize("factor", [1, 1.25, 8.0])
def test_a_capacity_leaves_room_for_every_choice(factor: float):
    assert HelixConfig(expert_capacity_factor=factor).expert_capacity_factor == factor


@pytest.mark.parametrize("factor", [0.5, 0, -1.0, float("nan")])
def test_a_capacity_below_what_the_choices_need_is_refused(factor: float):
    with pytest.raises(ValueError, match=r"expert_capacity_factor=.* leaves less room.*use 1\.0 or more"):
        HelixConfig(expert_capacity_factor=factor)


@pytest.mark.parametrize("factor", ["1.25", True, [1.0]])
def test_a_capacity_that_is_no_number_is_refused(factor: object):
    with pytest.raises(TypeError, match=r"expert_capacity_factor must be a number, such as 1\.25, or None"):
        HelixConfig(expert_capacity_factor=factor)


def test_what_is_spread():
    assert HelixConfig().zero_stage == 0
    assert HelixConfig(shard_optimizer=True, ep_size=2).zero_stage == 1
    assert HelixConfig(shard_parameters=True).zero_stage == 3


def test_options_of_context_parallelism():
    made = HelixConfig.from_mapping({"cp_size": 2, "cp_method": "all_gather", "inter_node_axes": ["cp"]}, "here")
    assert (made.cp_size, made.cp_method, made.inter_node_axes) == (2, "all_gather", ("cp",))
    assert made.ranks_per_batch == 2
    with pytest.raises(
        ValueError, match=r"cp_method='rings' is unknown; use one of ring, all_gather \(did you mean 'ring"
    ):
        HelixConfig(cp_method="rings")
    with pytest.raises(ValueError, match="inter_node_axes='pp' is no axis; use some of tp, cp, ep, dp"):
        HelixConfig(inter_node_axes=("pp",))
    with pytest.raises(
        TypeError, match=r"inter_node_axes must be a list, such as inter_node_axes=\['cp'\], or None; got 'cp'"
    ):
        HelixConfig(inter_node_axes="cp")


@pytest.mark.parametrize(
    ("share", "error"), [(-0.1, ValueError), (5, ValueError), ("5%", TypeError), (True, TypeError)]
)
def test_a_share_of_the_run_is_a_part_of_one(share: object, error: type[Exception]):
    with pytest.raises(error, match=r"tuning_share.* a number from 0 to 1, such as 0\.05"):
        HelixConfig(tuning_share=share)
    assert HelixConfig(tuning_share=1).tuning_share == 1


@pytest.mark.parametrize("mode", [None, *RECOMPUTE])
def test_recompute(mode: str | None):
    assert HelixConfig.from_mapping({"recompute": mode}, "here").recompute == mode


@pytest.mark.parametrize("mode", ["ful", True, "", 1])
def test_other_ways_to_recompute_are_refused(mode: object):
    with pytest.raises(ValueError, match=r"recompute=.* is unknown; use one of none, selective, full"):
        HelixConfig(recompute=mode)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_that_is_offered_is_taken(schedule: str):
    assert HelixConfig(schedule=schedule).schedule == schedule


def test_a_schedule_may_be_an_existing_file_but_not_a_folder(tmp_path: Path):
    path = str(write(tmp_path / "schedule.txt", "0F0 1F0 1B0 0B0"))
    assert HelixConfig(schedule=path).schedule == path
    with pytest.raises(ValueError, match="neither a schedule nor an existing file"):
        HelixConfig(schedule=str(tmp_path))


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_that_is_offered_is_taken(plan: str):
    assert HelixConfig(plan=plan).plan == plan


def test_an_unknown_plan_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"plan='gredy' is neither a rule nor an existing file; .*did you mean 'greedy'"
    ):
        HelixConfig(plan="gredy")


def test_a_plan_that_is_near_to_nothing_lists_the_rules():
    with pytest.raises(ValueError, match=r"rules: auto, search, greedy, dhelix, round_robin, intra_batch, sequential$"):
        HelixConfig(plan="xyz.json")


def test_a_plan_may_be_an_existing_file_but_not_a_folder(tmp_path: Path):
    path = str(write(tmp_path / "plan.json", "{}"))
    assert HelixConfig(plan=path).plan == path
    with pytest.raises(ValueError, match="neither a rule nor an existing file"):
        HelixConfig(plan=str(tmp_path))


@pytest.mark.parametrize("plan", ["intra_batch", "dhelix"])
def test_the_papers_rules_are_built(plan: str):
    assert plan in PLANS


@pytest.mark.parametrize("value", [True, 5, "absent.json", "", ["profile.json"]])
def test_a_profile_must_be_an_existing_file(value: object):
    with pytest.raises((TypeError, ValueError), match=r"^profile=.*hf-helix profile.*profile=None") as caught:
        HelixConfig(profile=value)
    assert repr(value) in str(caught.value)


def test_a_profile_may_be_an_existing_file_but_not_a_folder(tmp_path: Path):
    path = str(write(tmp_path / "profile.json", "{}"))
    assert HelixConfig(profile=path).profile == path
    with pytest.raises(ValueError, match="is not an existing file"):
        HelixConfig(profile=str(tmp_path))


def test_ablations_are_no_option():
    """They are for benchmarks: `benchmarks.paper.ablate`."""
    with pytest.raises(TypeError, match="HelixConfig: unknown option 'without'"):
        HelixConfig(without=("wgrad",))


@pytest.mark.parametrize("name", ["cache", "shard_optimizer"])
@pytest.mark.parametrize("value", [1, 0, "yes", None, []])
def test_a_switch_that_is_no_yes_or_no_is_refused(name: str, value: object):
    with pytest.raises(TypeError, match=f"^{name} must be true or false, such as {name}=True; got ") as error:
        HelixConfig(**{name: value})
    assert str(error.value).endswith(repr(value))


def test_an_unknown_schedule_lists_the_known_and_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"schedule='v' is neither .*; schedules: auto, folded_1f1b, dualpipe_v, 1f1b$"
    ):
        HelixConfig(schedule="v")
    with pytest.raises(ValueError, match=r"did you mean 'dualpipe_v'"):
        HelixConfig(schedule="dualpipev")


def test_layers_per_stage_are_taken_as_a_tuple_or_a_list():
    config = HelixConfig(pp_size=2, layers_per_stage=[3, 2, 2, 3])
    assert config.layers_per_stage == (3, 2, 2, 3)
    assert hash(config) == hash(HelixConfig(pp_size=2, layers_per_stage=(3, 2, 2, 3)))


@pytest.mark.parametrize("value", [2, "2,2", [2, "2"], [2.0], [True], {2}])
def test_layers_per_stage_that_are_no_whole_numbers_are_refused(value: object):
    with pytest.raises(TypeError, match=r"^layers_per_stage must be a list of whole numbers, such as .*; got "):
        HelixConfig(layers_per_stage=value)


def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HelixConfig().tp_size = 2  # type: ignore[misc]


# Mappings and files


def test_an_unknown_key_names_the_nearest_and_the_known():
    with pytest.raises(
        ValueError, match=r"here: unknown option 'tpsize' \(did you mean 'tp_size'\?\); known: tp_size, "
    ):
        HelixConfig.from_mapping({"tpsize": 2}, "here")


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match="here: unknown option 1; known: "):
        HelixConfig.from_mapping({1: 2}, "here")


@pytest.mark.parametrize("options", [None, 2, "tp_size: 2", ["tp_size"]])
def test_what_is_no_mapping_is_refused(options: object):
    with pytest.raises(TypeError, match="here: expected options such as 'tp_size: 2', got "):
        HelixConfig.from_mapping(options, "here")


@pytest.mark.parametrize(
    ("options", "error"),
    [({"tp_size": "2"}, TypeError), ({"tp_size": 0}, ValueError), ({"cp_method": "rings"}, ValueError)],
)
def test_a_wrong_value_says_where_it_came_from(options: dict[str, object], error: type[Exception]):
    with pytest.raises(error, match=r"^here: (tp_size|cp_method)"):
        HelixConfig.from_mapping(options, "here")


def test_a_file_may_hold_the_block_alone(tmp_path: Path):
    path = write(tmp_path / "helix.yaml", "tp_size: 2\nplan: greedy\n")
    assert HelixConfig.from_file(path) == HelixConfig(tp_size=2, plan="greedy")


def test_a_file_may_hold_the_block_among_the_options_of_accelerate(tmp_path: Path):
    text = "mixed_precision: 'no'\nparallelism_config:\n  helix:\n    tp_size: 2\n    plan: greedy\n"
    assert HelixConfig.from_file(write(tmp_path / "a.yaml", text)) == HelixConfig(tp_size=2, plan="greedy")


def test_a_file_may_be_json(tmp_path: Path):
    path = write(tmp_path / "helix.json", json.dumps({"tp_size": 2}))
    assert HelixConfig.from_file(str(path)) == HelixConfig(tp_size=2)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("tp_sise: 2", ValueError, r"unknown option 'tp_sise' \(did you mean 'tp_size'\?\)"),
        ("parallelism_config: {helix: {tp_sise: 2}}", ValueError, "unknown option 'tp_sise'"),
        ("parallelism_config: {helix: 2}", TypeError, "expected options such as"),
        ("parallelism_config: {tp_size: 2}", ValueError, "unknown option 'parallelism_config'"),
        ("tp_size: two", TypeError, "tp_size must be a whole number"),
        ("tp_size: yes", TypeError, "tp_size must be a whole number"),
        ("", TypeError, "expected options such as"),
        ("- tp_size", TypeError, "expected options such as"),
        ("tp_size: [2", ValueError, "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_named_with_its_error(tmp_path: Path, text: str, error: type[Exception], message: str):
    path = write(tmp_path / "helix.yaml", text)
    with pytest.raises(error, match=message) as caught:
        HelixConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot read the configuration file .*absent\.yaml"):
        HelixConfig.from_file(tmp_path / "absent.yaml")


# Precedence


def launched_with(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(launcher, "launcher_config_file", lambda: path)


def test_argument_before_plugin_before_environment_before_launcher(monkeypatch, tmp_path: Path):
    argument, plugin = HelixConfig(tp_size=5), HelixConfig(tp_size=4)
    launched_with(monkeypatch, write(tmp_path / "launch.yaml", "parallelism_config: {helix: {tp_size: 2}}"))
    assert resolve_config(None, None).tp_size == 2
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(write(tmp_path / "helix.yaml", "tp_size: 3")))
    assert resolve_config(None, None).tp_size == 3
    assert resolve_config(None, plugin) is plugin
    assert resolve_config(argument, plugin) is argument
    assert resolve_config(argument, None) is argument


def assert_every_way_is_shown(message: str) -> None:
    assert "no helix options were given" in message
    ways = (
        "HelixTrainer(..., helix_config=HelixConfig(",
        "TrainingArguments(..., parallelism_config=HelixPlugin(",
        "HELIX_CONFIG_FILE=",
        "accelerate launch --config_file",
    )
    for way in ways:
        assert way in message


def test_given_nowhere_shows_every_way():
    with pytest.raises(ValueError, match="no helix options") as error:
        resolve_config(None, None)
    assert_every_way_is_shown(str(error.value))


def test_a_launcher_file_without_the_block_is_nowhere(monkeypatch, tmp_path: Path):
    launched_with(monkeypatch, write(tmp_path / "launch.yaml", "num_processes: 2\nparallelism_config: {tp_size: 2}"))
    with pytest.raises(ValueError, match="no helix options") as error:
        resolve_config(None, None)
    assert_every_way_is_shown(str(error.value))


def test_an_empty_variable_is_not_a_file(monkeypatch, tmp_path: Path):
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, "")
    launched_with(monkeypatch, write(tmp_path / "launch.yaml", "parallelism_config: {helix: {tp_size: 2}}"))
    assert resolve_config(None, None).tp_size == 2


def test_a_wrong_file_is_not_passed_over(monkeypatch, tmp_path: Path):
    """An error in a place of higher precedence does not fall through to a lower one."""
    launched_with(monkeypatch, write(tmp_path / "launch.yaml", "parallelism_config: {helix: {tp_size: 2}}"))
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(ValueError, match=r"absent\.yaml"):
        resolve_config(None, None)


def test_a_wrong_block_of_the_launcher_names_its_file(monkeypatch, tmp_path: Path):
    launched_with(monkeypatch, write(tmp_path / "launch.yaml", "parallelism_config: {helix: {tp: 2}}"))
    with pytest.raises(ValueError, match=r"launch\.yaml: unknown option 'tp'"):
        resolve_config(None, None)


@pytest.mark.parametrize("wrong", [{"tp_size": 2}, "helix.yaml", 2])
def test_only_a_config_is_a_config(wrong: object):
    for arguments in ((wrong, None), (None, wrong)):
        with pytest.raises(TypeError, match="must be a HelixConfig, got "):
            resolve_config(*arguments)


# The launcher


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch --config_file X.yaml s.py",
        "accelerate launch --config_file=X.yaml s.py",
        "accelerate launch --num_processes 2 --config_file X.yaml s.py --lr 1",
        "accelerate-launch --config_file X.yaml s.py",
        "python -m accelerate.commands.launch --config_file X.yaml s.py",
        "/usr/bin/python3 /venv/bin/accelerate launch --config_file X.yaml s.py",
        "/usr/bin/python3 /venv/bin/accelerate-launch --config_file=X.yaml s.py",
        "/usr/bin/python3 /site-packages/accelerate/commands/launch.py --config_file X.yaml s.py",
    ],
)
def test_the_file_of_a_launcher_is_found(command: str):
    assert config_file_of(command.split()) == "X.yaml"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python script.py --config_file X.yaml",
        "torchrun --nproc_per_node 2 script.py --config_file X.yaml",
        "python script.py --backend accelerate --config_file X.yaml",
        "python train/accelerate_it.py --config_file X.yaml",
        "accelerate launch s.py",
        "accelerate launch --config_file",
        "accelerate launch --deepspeed_config_file X.yaml s.py",
    ],
)
def test_other_commands_have_no_such_file(command: str):
    assert config_file_of(command.split()) is None


class FakeProcess:
    """A process tree: this process, its parent and so on, each a command line or None for one that may not be read."""

    tree: tuple[str | None, ...] = ()

    def __init__(self, command: str | None = "") -> None:
        self.command = command

    def parents(self) -> list[FakeProcess]:
        return [FakeProcess(command) for command in self.tree]

    def cmdline(self) -> list[str]:
        import psutil

        if self.command is None:
            raise psutil.AccessDenied
        return self.command.split()

    def cwd(self) -> str:
        return "/work"


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (("python -m accelerate.commands.launch --config_file X.yaml s.py",), "/work/X.yaml"),
        (("sh -c x", None, "accelerate launch --config_file /etc/X.yaml s.py"), "/etc/X.yaml"),
        (("bash", "python script.py --config_file X.yaml"), None),
        ((), None),
    ],
)
def test_the_launcher_is_looked_for_among_the_parents(monkeypatch, tree: tuple[str | None, ...], path: str | None):
    monkeypatch.setattr(FakeProcess, "tree", tree)
    monkeypatch.setattr("psutil.Process", FakeProcess)
    assert launcher_config_file() == (path and Path(path))


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("accelerate launch --cpu t.py --config_file own.ini", None),
        ("python -u -m accelerate.commands.launch --config_file c.yaml t.py", "c.yaml"),
        ("accelerate launch --config-file c.yaml t.py", "c.yaml"),
        ("python launch.py --config_file x.yaml", None),
        ("python /lib/accelerate/commands/launch.py --config_file c.yaml t.py", "c.yaml"),
    ],
)
def test_only_the_launchers_own_option_counts(command, file):
    assert config_file_of(command.split()) == file


def test_options_beside_the_block_are_not_dropped(tmp_path):
    path = tmp_path / "both.yaml"
    path.write_text("tp_size: 4\nparallelism_config:\n  helix:\n    tp_size: 2\n")
    with pytest.raises(ValueError, match="tp_size stands beside the helix block"):
        HelixConfig.from_file(path)


def test_an_empty_block_is_named(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("parallelism_config:\n  helix:\n")
    with pytest.raises(TypeError, match=r"empty.yaml: expected options such as 'tp_size: 2', got None"):
        HelixConfig.from_file(path)


def test_a_file_of_bytes_is_named(tmp_path):
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"bytes\.yaml"):
        HelixConfig.from_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "tp_size: 2\ninter_node_axes: [tp, cp]\ncache: no\n",
        "tp_size: 2\ncache: false\ninter_node_axes:\n  - tp\n  - cp\n",
    ],
)
def test_lists_and_cache_in_yaml(tmp_path: Path, text: str):
    config = HelixConfig.from_file(write(tmp_path / "helix.yaml", text))
    assert config == HelixConfig(tp_size=2, inter_node_axes=("tp", "cp"), cache=False)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("without: [wgrad]", ValueError, "unknown option 'without'"),
        ("inter_node_axes: tp", TypeError, "inter_node_axes must be a list"),
        ("inter_node_axes: [tq]", ValueError, "inter_node_axes='tq' is no axis"),
        ("inter_node_axes: [yes]", ValueError, "inter_node_axes=True is no axis"),
        ("cache: 1", TypeError, "cache must be true or false"),
        ("profile: absent.json", ValueError, "profile='absent.json' is not an existing file"),
    ],
)
def test_wrong_lists_and_caches_in_yaml_name_the_file(tmp_path: Path, text: str, error: type[Exception], message: str):
    path = write(tmp_path / "helix.yaml", text)
    with pytest.raises(error, match=message) as caught:
        HelixConfig.from_file(path)
    assert str(caught.value).startswith(f"{path}: ")
