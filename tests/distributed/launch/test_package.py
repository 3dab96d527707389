"""The sdist and the wheel hold the package and nothing else; from the wheel alone, the command runs, and what a user
runs first."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from support.paths import ROOT

import hf_helix

pytest.importorskip("build")
pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml asks; the build takes the installed one


def run(*words: object, **environment: str) -> str:
    options = {"capture_output": True, "text": True, "env": {**os.environ, **environment}, "timeout": 120}
    ran = subprocess.run(list(map(str, words)), cwd=environment.get("HOME", ROOT), **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the files that git knows, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("built")
    files = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in files.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "clone" / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder / "clone")
    return folder


def test_they_hold_the_package(built: Path) -> None:
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_helix").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package <= names
    assert not {name for name in names if name.startswith(("tests", "benchmarks", "docs", "recipes"))}


@pytest.mark.slow
def test_a_user_of_the_wheel(built: Path, tmp_path: Path) -> None:
    """As `make package`, but for packages that the wheel requires: these are read from this environment."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "environment", with_pip=False)
    programs = tmp_path / "environment" / "bin"
    install = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--quiet", wheel]
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # pip would find the clone there
    subprocess.run(install, env=alone, check=True)
    (packages,) = (tmp_path / "environment").glob("lib/*/site-packages")
    (packages / "required.pth").write_text(sysconfig.get_path("purelib"))  # without its .pth files: not the clone
    launcher = programs / "accelerate"
    launcher.write_text(f"#!{programs / 'python'}\nfrom accelerate.commands.accelerate_cli import main\nmain()\n")
    launcher.chmod(0o755)
    script = ROOT / "tests" / "support" / "packaged.py"
    done = subprocess.run([programs / "python", script, "--without_demo"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "$ accelerate launch" in done.stdout


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["title"], str(cited["version"])) == ("hf_helix", hf_helix.__version__)
    assert {"cff-version", "message", "authors"} <= cited.keys()  # without them the file is not valid
