"""A command line makes a command, and a command its line; options of `HelixConfig` have its words and defaults."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hf_helix.cli import COMMANDS, main
from hf_helix.cli.options import Command, config_option
from hf_helix.cli.profile import ProfileCommand
from hf_helix.cli.simulate import SimulateCommand
from hf_helix.config import HelixConfig


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands that would have run."""
    result: list[Command] = []
    for command in COMMANDS:
        if isinstance(command, type):
            monkeypatch.setattr(command, "run", lambda self: result.append(self))
    return result


WORDS = (
    *("profile", "--model", "M", "--tp-size", "1", "--pp_size=2", "--inter_node_axes", "tp", "cp"),
    *("--expert_capacity_factor", "1.5", "--bf16", "--trace", "t.json"),
)


def test_a_command_line_makes_a_command_and_a_command_its_line(made: list[Command]) -> None:
    main(WORDS)
    main(made[0].words())
    expected = ProfileCommand(
        model="M", tp_size=1, pp_size=2, inter_node_axes=["tp", "cp"], expert_capacity_factor=1.5, bf16=True
    )
    expected.trace = Path("t.json")
    assert made == [expected, expected]
    # Options of the configuration are handed to it.
    given = ProfileCommand(model="M", pp_size=2, schedule="folded_1f1b").of_config()
    assert HelixConfig(**given) == HelixConfig(tp_size=2, pp_size=2, schedule="folded_1f1b", recompute="none")


def test_what_is_left_out_has_the_default_of_the_field(made: list[Command]) -> None:
    main(["simulate", "--model", "M", "--cluster", "h100x8"])
    assert made == [SimulateCommand(model="M", cluster="h100x8")]


@pytest.mark.parametrize("name", [each.name for each in fields(HelixConfig)])
def test_every_option_of_the_configuration_has_words_and_a_default(name: str) -> None:
    option: Any = config_option(name)
    assert len(option.metadata["help"].split()) > 2
    assert not option.metadata["help"].endswith((".", ":", ";"))
    assert option.default == getattr(HelixConfig(), name)
