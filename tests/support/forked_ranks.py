"""Scripts and commands on ranks that are forked from the process that has imported everything, see `cluster`.

In:   a script, or `-m` and a module, with its flags, as a launcher is given them.
Out:  the ranks of one run in the environment that a launcher makes; what each prints is in `RANK.log`.
Must hold: an error reaches the exception hooks and exit functions of the rank, as in a process of its own.

A rank of a launch imports torch and transformers first, which takes longer than most of what tests look at. What only
a launcher shows is in tests that really launch.
"""

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.cluster import forking, free_port


class ForkedRank:
    """A rank that runs; like `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        process.start()

    def wait(self, timeout: float | None = None) -> int:
        """The status of its end."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"{self.process.name} still runs after {timeout} s")
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)


def fork_ranks(
    folder: Path, *words: object, helix: str = "tp_size: 2\n", world: int = 2, files: bool = False
) -> list[ForkedRank]:
    """Ranks without a launcher that would end the one when the other has failed.

    Args:
        folder: where they run, and where each writes `RANK.log`.
        words: the script, or `-m` and the module, and its flags.
        helix: the text of the YAML file with their options.
        files: whether each is told of an error file, as by torchrun: `attempt_0/RANK/error.json`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "options.yaml").write_text(helix)
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    common |= {"LOCAL_WORLD_SIZE": str(world), "HELIX_CONFIG_FILE": "options.yaml"}
    started = []
    for rank in range(world):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if files:
            file = folder / "attempt_0" / str(rank) / "error.json"
            file.parent.mkdir(parents=True)
            environment["TORCHELASTIC_ERROR_FILE"] = str(file)
        given = (str(folder), [str(word) for word in words], environment)
        started.append(ForkedRank(forking().Process(target=_run, args=given, daemon=True)))
    return started


def logs_of(ranks: list[ForkedRank], folder: Path, limit: float = 200) -> str:
    """All that ranks have printed, which end well."""
    try:
        statuses = [rank.wait(limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = "".join((folder / f"{rank}.log").read_text() for rank in range(len(ranks)))
    assert statuses == [0] * len(ranks), logs
    return logs


def _run(folder: str, words: list[str], environment: Mapping[str, str]) -> None:
    """In the process of a rank."""
    os.chdir(folder)
    os.environ.update(environment)
    log = os.open(f"{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in a shell's background
    import torch

    torch.set_num_threads(1)
    # Sets the hooks of the process as it is imported, and the process that this one is forked from has imported it.
    sys.modules.pop("hf_helix.integrations.accelerate.plugin", None)
    status = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    atexit._run_exitfuncs()
    sys.exit(status)
