"""Scripts started as users start them: by a launcher, or rank by rank, as on several hosts."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from support.cluster import free_port
from support.forked_ranks import ForkedRank
from support.paths import ROOT

LIMIT = 60  # seconds within which every rank ends after one has failed
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
SUPPORT = ROOT / "tests" / "support"


def launch_config(folder: Path, name: str = "cpu_tp2", helix: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A copy of one of accelerate_configs with a port of its own, written to `launch.yaml`.

    Args:
        helix: options that take the place of those of the file.
        changes: fields of the launcher.
    """
    config = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
    config.update(main_process_port=free_port(), **changes)
    if helix is not None:
        config["parallelism_config"]["helix"] = helix
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(
    folder: Path, words: Sequence[object], output: Any = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """Python with these words, in a session of its own; `output` takes what it prints."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PATHS, **environment},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def accelerate(config: Path, script: Path, *flags: object, **environment: str) -> subprocess.Popen[str]:
    """`accelerate launch`, in the folder of its configuration."""
    words = ["-m", "accelerate.commands.launch", "--config_file", config.name, script, *flags]
    return start(config.parent, words, **environment)


def torchrun(folder: Path, script: Path, *flags: object, options: Sequence[str] = (), **environment: str) -> Any:
    """`torchrun` with two ranks."""
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", *options]
    return start(folder, [*words, script, *flags], **environment)


def output_of(process: subprocess.Popen[str], limit: float = 150) -> str:
    """All that was printed; everything that the process has started is ended."""
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"still running after {limit} s:\n{process.communicate()[0]}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def seconds_until_others_end(ranks: Sequence[subprocess.Popen[bytes] | ForkedRank], victim: int) -> float:
    """Seconds from the end of the rank that fails to that of the last of the others; raises after `LIMIT`."""
    try:
        ranks[victim].wait(timeout=200)
        failed = time.monotonic()
        for process in ranks:
            process.wait(timeout=max(1.0, LIMIT - (time.monotonic() - failed)))
        return time.monotonic() - failed
    finally:
        for process in ranks:
            process.kill()
            process.wait()
