"""`hf-helix --help` explains every option without torch; `models`, `env`, `--version`, names on the Hub."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hf_helix import __version__
from hf_helix.cli import COMMANDS, EXAMPLES, build_parser, command_parsers, main
from hf_helix.cli.options import configuration_file


def commands() -> dict[str, argparse.ArgumentParser]:
    _, *named = command_parsers().items()
    return {name.removeprefix("hf-helix "): parser for name, parser in named}


def test_every_option_has_a_word_and_shows_its_default() -> None:
    assert len(commands()) == len(COMMANDS)
    for name, parser in commands().items():
        text = " ".join(parser.format_help().split())
        for action in parser._actions:
            assert action.help, (name, action.dest)
            if action.default not in (None, False, [], argparse.SUPPRESS):
                assert f"(default: {action.default})" in text, (name, action.dest)


def test_every_example_parses() -> None:
    texts = [EXAMPLES, *(parser.epilog or "" for parser in commands().values())]
    lines = [line.strip().partition("   ")[0] for text in texts for line in text.splitlines()]
    examples = [shlex.split(line) for line in lines if line.startswith("hf-helix ")]
    assert {words[1] for words in examples} == commands().keys()
    for words in examples:
        build_parser().parse_args(words[1:])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hf-helix {__version__}\n"


def test_env_says_what_an_issue_needs_and_no_secret(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_API_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    main(["env"])
    text = capsys.readouterr().out
    facts = dict(line[2:].split(": ", 1) for line in text.splitlines())
    assert facts["hf_helix"].startswith(__version__)
    wanted = {"python", "platform", "torch", "transformers", "accelerate", "peft", "trl", "flash-attn", "cores"}
    assert wanted | {"cache", "torch backends"} <= facts.keys()
    assert facts["WORLD_SIZE"] == "8"
    assert facts["ACCELERATE_API_KEY"] == "(not shown)"
    assert "hidden" not in text


def test_env_without_torch(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "hf_helix.tuning.cache", raising=False)
    main(["env"])
    assert "- torch: cannot be imported: " in capsys.readouterr().out


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache with one model in it, and no connection."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1234")
    (folder / "snapshots" / "1234").mkdir(parents=True)
    (folder / "snapshots" / "1234" / "config.json").write_text("{}")
    return folder


def test_a_name_on_the_hub_is_its_configuration(hub: Path) -> None:
    assert configuration_file("org/model") == str(hub / "snapshots" / "1234" / "config.json")
    assert configuration_file(str(hub)) == str(hub)


def test_a_misspelt_folder_has_the_nearest_name(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny-llama").mkdir()
    (tmp_path / "tiny-llama" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no such folder or file here \(did you mean '.*/tiny-llama'\?\)"):
        configuration_file(str(tmp_path / "tiny-lama"))


def test_no_command_is_a_question_for_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-helix"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "hf-helix COMMAND --help" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["org/other", "./nowhere", "/no/such/folder/here"])
def test_a_model_that_is_nowhere(model: str, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["profile", "--model", model])
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(f"hf-helix profile: {model}: there is no such folder or file here, and the Hub gave ")
    assert text.endswith("with a connection and without HF_HUB_OFFLINE=1, a name such as Qwen/Qwen3-0.6B\n")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM is a class, which has no sizes; give a folder with a config.json"),
        ("LlamaForCausalLMM", "LlamaForCausalLMM is no class of Transformers"),
        ("gpt2", "gpt2: there is no such folder or file here, and the Hub gave no config.json"),
    ],
)
def test_a_class_in_the_place_of_a_model(model: str, words: str, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--model", model, "--cluster", "h100x8"])
    assert capsys.readouterr().err.startswith(f"hf-helix doctor: {words}")


def test_files_of_clusters_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cluster", "--list"])
    assert "h100x8         a node of 8 H100\n" in capsys.readouterr().out
    main(["cluster", "--show", "H100x8"])
    assert capsys.readouterr().out.startswith("name: a node of 8 H100\n")


def test_a_name_that_no_class_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "nosuch"])
    assert "no class has 'nosuch' in its name" in capsys.readouterr().err
