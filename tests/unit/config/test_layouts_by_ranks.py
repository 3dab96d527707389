"""Layouts by the number of ranks: the one in force, and the micro-batches that keep the samples of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.integrations.accelerate.foreign_sizes import foreign_sizes_of, with_foreign_sizes
from hf_helix.integrations.accelerate.launcher import CONFIG_FILE_VARIABLE, resolve_config
from hf_helix.integrations.accelerate.layouts import in_force, notice_of_launcher, steps_of

LAYOUTS = {16: {"tp_size": 2, "shard_optimizer": True}, 32: {"tp_size": 2, "pp_size": 2}, 24: {"tp_size": 4}}
TEXT = """
parallelism_config:
  helix:
    recompute: full
    layouts:
      16: {tp_size: 2, shard_optimizer: true}
      32: {tp_size: 2, pp_size: 2}
      24: {tp_size: 4, recompute: selective}
"""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of ranks that a launcher has started."""
    return lambda count: monkeypatch.setenv("WORLD_SIZE", str(count))


def test_a_file_names_a_layout_for_each_number_of_ranks(
    tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "helix.yaml"
    file.write_text(TEXT)
    given = HelixConfig.from_file(file)
    assert list(given.layouts or ()) == [32, 24, 16]
    assert given.for_world(24) == HelixConfig(tp_size=4, recompute="selective")
    assert given.by_world()[16] == HelixConfig(tp_size=2, shard_optimizer=True, recompute="full")
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(file))
    ranks(32)
    assert in_force(resolve_config(None, None)) == HelixConfig(tp_size=2, pp_size=2, recompute="full")
    assert HelixPlugin().config.pp_size == 2
    assert HelixPlugin().given == given
    ranks(8)
    with pytest.raises(
        ValueError, match=r"no layout for 8 ranks, only for 32, 24, 16; add one, such as layouts=\{\.\.\., "
    ):
        in_force(given)


def test_numbers_of_a_json_file_are_text(tmp_path: Path) -> None:
    file = tmp_path / "helix.json"
    file.write_text(json.dumps({"layouts": LAYOUTS}))
    assert HelixConfig.from_file(file) == HelixConfig(layouts=LAYOUTS)
    assert hash(HelixConfig(layouts=LAYOUTS)) == hash(HelixConfig())


def test_without_layouts_options_hold_for_every_number_of_ranks(ranks: Any) -> None:
    ranks(7)
    given = HelixConfig(tp_size=2)
    assert in_force(given) is given
    assert steps_of(given, 3) == 3
    assert given.by_world() == {}


@pytest.mark.parametrize(
    ("layouts", "error", "words"),
    [
        ({}, TypeError, "layouts must be options by numbers of ranks, such as layouts="),
        ([4, 2], TypeError, "layouts must be options by numbers of ranks"),
        ({"four": {}}, TypeError, "'four' is no number of ranks; use a whole number from 1 on"),
        ({0: {}}, TypeError, "0 is no number of ranks"),
        ({True: {}}, TypeError, "True is no number of ranks"),
        ({4: None}, TypeError, "layouts: 4 must be options of one layout, such as"),
        ({4: {"layouts": {2: {}}}}, TypeError, "layouts: 4 must be options of one layout"),
        ({4: {"tp": 2}}, ValueError, r"layouts: 4: unknown option 'tp' \(did you mean 'tp_size'\?\)"),
        ({4: {"tp_size": "2"}}, TypeError, "layouts: 4: tp_size must be a whole number"),
        (
            {24: {"tp_size": 4, "pp_size": 4}},
            ValueError,
            "layouts: 24: tp_size=4 x pp_size=4 must divide 24 ranks; use",
        ),
        ({6: {"tp_size": 2, "ep_size": 2}}, ValueError, "layouts: 6: tp_size=2 x ep_size=2 must divide 6 ranks"),
        ({2: {}, 4: {"shard_optimizer": True}, 3: {"spread_vocabulary": True}}, ValueError, "layouts: 3: spread_vocab"),
    ],
)
def test_what_no_start_could_do_is_an_error_of_the_first(layouts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        HelixConfig(layouts=layouts)


def test_a_step_keeps_its_samples_on_fewer_ranks(ranks: Any) -> None:
    given = HelixConfig(layouts={32: {"tp_size": 4}, 16: {"tp_size": 4}, 24: {"tp_size": 4, "pp_size": 3}})
    for count, steps in ((32, 6), (16, 12), (24, 24)):
        ranks(count)
        assert steps_of(given, 6) == steps
        assert steps * count // given.for_world(count).ranks_per_batch == 48
    uneven = HelixConfig(layouts={32: {"tp_size": 4}, 24: {"tp_size": 4}, 16: {"tp_size": 4}})
    assert steps_of(uneven, 6) == 8
    words = (
        "gradient_accumulation_steps=4 with layouts: a step has 32 micro-batches, 4 on each of the 8 data-parallel "
        "ranks of 32 ranks, and the 6 data-parallel ranks of 24 ranks cannot share them equally; use "
        "gradient_accumulation_steps=6, or another multiple of 3"
    )
    with pytest.raises(ValueError, match=words):
        steps_of(uneven, 4)


def test_a_loop_of_ones_own_follows_the_ranks_once() -> None:
    plugin = HelixPlugin(layouts={2: {"shard_optimizer": True}, 1: {}})
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, parallelism_config=plugin)
    for _ in range(2):
        plugin._follow(accelerator)
        assert accelerator.gradient_accumulation_steps == 6
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_a_layout_of_another_library_is_for_one_number_of_processes() -> None:
    foreign = foreign_sizes_of(ParallelismConfig(tp_size=2))
    assert foreign is not None
    with pytest.raises(
        ValueError, match=r"ParallelismConfig\(tp_size=2\) lays out one number of processes, and layouts="
    ):
        with_foreign_sizes(HelixConfig(layouts=LAYOUTS), foreign)


def test_a_launcher_that_takes_no_node_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notice_of_launcher() == ""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "100")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in notice_of_launcher()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert notice_of_launcher() == ""
