"""Every printed command runs as it stands, in one's own environment, or names what it needs.

Commands are printed in the pages (blocks and inline), in `--help`, and in the docstrings of recipes and benchmarks.
They are run in a copy of the repository, in the order of their page, since a later command may read the files of an
earlier one.
"""

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.paths import ROOT

from hf_helix.cli import build_parser, command_parsers

PROGRAMS = "hf-helix|accelerate|python|make|pip|torchrun|sbatch|git|pytest"
COMMAND = rf"\s*((?:[A-Z_]+=\S+ )*(?:sudo env \S+ )?(?:\S*bin/)?(?:{PROGRAMS}) \S.*)"
NEEDS = {
    r"^(pip|git) ": "a package index",
    r"^sudo ": "root, to shape links",
    r"^sbatch ": "Slurm",
    r"--machine_rank|--nnodes": "several hosts",
    r"gpu(_\w+)?\.yaml|/helix\.yaml|benchmarks\.gpu(?!.*--dry)|gpu-check|NCCL": "a GPU",
    r"--config_file helix\.yaml": "the devices of the file",
    r"[A-Z]\w+/[A-Z][\w.]+-|google/": "the Hub",
    r"\.\.\.|\b(HOST|N|NAME|PAIRS|PROMPTS|TESTS|train\.py|check\.py|\w+\.jsonl|starcoder2)\b": "a reader's own",
    r"^make (?!demo|docs|help|site)": "minutes to hours",
    r"python -m benchmarks\.(?!gpu --dry|paper --figure|paper\.ablate)": "a quiet machine for minutes to hours",
    r"pytest": "minutes to hours",
}
"""Patterns of commands that a test cannot run, and what each needs."""
READERS = {
    r"--cluster NAME\b": "--cluster l40sx8",
    r"\bsimulate --model path/to/folder": "simulate --model recipes/models/llama-8b",  # has heads for tp_size=8
    r"\b(FOLDER_OR_NAME|NAME_OR_FOLDER|FOLDER|MODEL|M|path/to/folder)\b": "recipes/models/tiny-llama",
    r"\b(LAYOUT|FILE)\b": "accelerate_configs/cpu_tp2.yaml",
    r"\bcheck NAME\b": "check LlamaForCausalLM",
    r"\b(YOUR_SCRIPT|SCRIPT|your_script|script)\.py": "recipes/pretrain.py",
    r" \[STEPS\]": "",
}
"""What a reader puts in the place of a word, and what the test puts there."""


def texts() -> Iterator[tuple[str, str]]:
    """Whatever prints commands: its name, and its text with each command at the start of a line."""
    for page in sorted(page for pattern in ("*.md", "docs/*.md", "[a-z]*/**/README.md") for page in ROOT.glob(pattern)):
        text = page.read_text()
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        inline = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))
        blocks = re.findall(r"^```.*?^```|^    .*$", text, flags=re.DOTALL | re.MULTILINE)
        yield str(page.relative_to(ROOT)), "\n".join([*blocks, *filter(is_whole, inline)])
    for module in sorted([*ROOT.glob("recipes/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/*/*.py")]):
        yield str(module.relative_to(ROOT)), ast.get_docstring(ast.parse(module.read_text())) or ""
    for layout in sorted(ROOT.glob("accelerate_configs/*.yaml")):
        yield str(layout.relative_to(ROOT)), re.sub(r"^# *", "", layout.read_text(), flags=re.MULTILINE)
    for name, parser in command_parsers().items():
        yield f"{name} --help", parser.format_help().partition("options:")[2]


def is_whole(code: str) -> bool:
    """Whether words within a sentence are a command, rather than the name of a command with an option."""
    if not code.startswith("hf-helix "):
        return not re.fullmatch(r"(accelerate|torchrun) (launch|config)?( ?--\S+( \S+)?)?", code)
    if len(code.split()) == 2 and code not in ("hf-helix env", "hf-helix models"):
        return False
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            build_parser().parse_args(shlex.split(filled(code))[1:])
    except (SystemExit, ValueError):
        return False
    return True


@cache
def printed() -> dict[str, list[str]]:
    """The commands by what prints them, each once, with single spaces."""
    found: dict[str, list[str]] = {}
    for source, text in texts():
        lines = re.sub(r"\\\n\s*", "", text).splitlines()
        matches = [match for line in lines if (match := re.match(COMMAND, line))]
        commands = [re.split(r"\s{2,}|\s#", match[1])[0].strip() for match in matches]
        if commands:
            found[source] = list(dict.fromkeys(commands))
    return found


def filled(command: str) -> str:
    """The command with a reader's own words in place."""
    for pattern, value in READERS.items():
        command = re.sub(pattern, value, command)
    return command


def needs(command: str) -> str | None:
    return next((what for pattern, what in NEEDS.items() if re.search(pattern, filled(command))), None)


def test_commands_are_found() -> None:
    every = [command for commands in printed().values() for command in commands]
    assert sum(needs(command) is None for command in every) > 60
    assert all(any(re.search(pattern, filled(command)) for command in every) for pattern in NEEDS)


def test_no_command_needs_the_environment_that_make_builds() -> None:
    for source, commands in printed().items():
        assert not [command for command in commands if ".venv/bin" in command], source


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which a reader has run the demo and measured a profile."""
    folder = tmp_path_factory.mktemp("reader") / "hf_helix"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info"))
    for command in ("make demo", "hf-helix profile --model recipes/models/tiny-llama", "hf-helix plan profile.json"):
        run(command, folder)
    return folder


def run(command: str, folder: Path) -> None:
    """Runs a command as a shell does, with this environment's programs first."""
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "VENV": str(programs.parent),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(folder),
        "HELIX_CACHE": str(folder / "cache"),
    }
    command = command.replace("make ", f"make -o {programs.parent}/.installed ")  # nothing is installed from the copy
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("source", [source for source, commands in printed().items() if None in map(needs, commands)])
def test_printed_commands_run(source: str, checkout: Path, ran: set[str]) -> None:
    for command in printed()[source]:
        words = filled(command).removeprefix("OMP_NUM_THREADS=1 ")
        if needs(command) is None and words not in ran:
            run(words, checkout)
            ran.add(words)


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """The commands that have run: many are printed in several places."""
    return set()
