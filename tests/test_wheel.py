"""The sdist and the wheel that it builds are whole: what a user runs first runs from the wheel.

The wheel is alone in an environment of its own; the packages that it requires are read from this environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from support.paths import ROOT


def test_a_user_of_the_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert [*(tmp_path / "dist").glob("*.tar.gz")]
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
