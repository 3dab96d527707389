"""Two real ranks, on one GPU if there is only one: every layout against the unsplit model, a save, a kill, the Trainer.

What is asked: in each layout losses and norms of gradients like those of the unsplit model in this process, to 2e-3;
a saved model whose files hold the same bits as `save_pretrained` of Transformers; a rank that is killed ends the other
within 60 s, with its name; HelixTrainer under torchrun has the losses of the stock Trainer. No speed: two processes
take turns on the GPU.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu.layouts import CASES, FOUND, Case, unsplit_steps
from benchmarks.gpu.pair import Pair, environment_of, free_port
from benchmarks.gpu.report import Options, Report

CLOSE = 2e-3
CASE_LIMIT, MEASURED_LIMIT, START_LIMIT = 60.0, 120.0, 60.0
"""Seconds without news after which a pair hangs: of a case, of one that measures first; and what a start may add."""
PATIENCE = 3
"""Pairs that may fail before the cases that are left are given up."""
END_LIMIT = 60.0
MOST_STEPPED = 0.75
"""Of two ranks that spread parameters, what one may step: half, and a little more where pieces are small."""
TRAINER = "benchmarks.gpu.rank_trainer"


def run(report: Report, options: Options) -> None:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as thread:
        folder = Path(scratch)

        def attempt(name: str, check: Callable[[Report, str, Path, bool], None]) -> None:
            with report.attempt(name):
                check(report, name, folder, options.dry)

        def check_processes() -> None:
            thread.submit(attempt, "HelixTrainer under torchrun", check_trainer)
            thread.submit(attempt, "a killed rank", check_kill)

        if not options.dry:  # beside the layouts: processes start slowly, and then mostly wait
            check_processes()
        for numbers in in_groups(options.dry):
            check_cases(report, folder, options, numbers)
        if options.dry:
            check_processes()


def in_groups(dry: bool) -> list[list[int]]:
    """The numbers of cases that share processes: those without a pipeline, pipelines, and last those that measure.

    Pipelines have processes of their own, so that a pipeline that hangs ends no other case.
    """
    numbers = range(len(CASES))
    pipelines = [number for number in numbers if CASES[number].options.get("pp_size", 1) > 1]
    others = [number for number in numbers if number not in pipelines]
    slow = [number for number in others if CASES[number].is_measured]
    quick = [number for number in others if number not in slow]
    return [[*quick, *pipelines, *slow]] if dry else [quick, pipelines, slow]


def check_cases(report: Report, folder: Path, options: Options, numbers: Sequence[int]) -> None:
    """Layouts against the unsplit model: losses, norms, and the files of a save."""
    references: dict[Any, tuple[list[float], list[float]]] = {}
    for number, outcome in outcomes(numbers, folder, options.dry):
        case = CASES[number]
        with report.attempt(case.name):
            if "error" in outcome:
                report.check(case.name, False, outcome["error"])
                continue
            stock = folder / f"stock-{case.family}"
            if case.reference not in references:
                references[case.reference] = unsplit_steps(case, options.device, stock)
            compare(report, case, outcome, references[case.reference])
            compare_files(report, case, folder / str(number), stock)


def outcomes(numbers: Sequence[int], folder: Path, dry: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """What was found of each case, as it is found; after a failure the rest goes on in new processes."""
    left, failures = list(numbers), 0
    while left:
        if failures == PATIENCE:
            yield from ((number, {"error": f"not run after {PATIENCE} failures"}) for number in left)
            return
        record = folder / FOUND
        record.write_text("")
        given = ["--folder", str(folder), *(["--dry"] if dry else []), *map(str, left)]
        failed = ""
        with Pair("benchmarks.gpu.layouts", given, folder, "layouts", dry) as pair:
            last = time.monotonic() + START_LIMIT
            while left and not failed:
                over = None not in pair.statuses()
                told = _entries(record)
                mine = next((entry for entry in told if entry["case"] == left[0]), None)
                if mine is not None:
                    last = time.monotonic()
                    failed = mine.get("error", "")
                    yield left.pop(0), mine
                elif over or time.monotonic() - last > (limit := _limit(left[0])):
                    failed = "ended without a word" if over else f"no news for {limit:.0f} s"
                    print(pair.said(), file=sys.stderr, flush=True)
                    yield left.pop(0), {"error": f"{failed}: {pair.said(1)}".replace("\n", "; ")}
                time.sleep(0.05)
            if failed:
                failures += 1
                with contextlib.suppress(subprocess.TimeoutExpired):
                    for process in pair.processes:
                        process.wait(5)
                print(pair.said(30), file=sys.stderr, flush=True)


def _limit(number: int) -> float:
    return MEASURED_LIMIT if CASES[number].is_measured else CASE_LIMIT


def _entries(record: Path) -> list[dict[str, Any]]:
    text = record.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def compare(report: Report, case: Case, outcome: dict[str, Any], wanted: tuple[list[float], list[float]]) -> None:
    """Losses and norms of a layout beside those of the unsplit model."""
    losses, norms = (_furthest(outcome[name], values) for name, values in zip(("losses", "norms"), wanted, strict=True))
    figure = f"losses {losses:.1e}, norms of gradients {norms:.1e} off the unsplit model's (at most {CLOSE:.0e})"
    kept = f", kept {outcome['kept']}" if outcome["kept"] else ""
    report.check(case.name, max(losses, norms) <= CLOSE, f"{figure}{kept}, {outcome['seconds']:.1f} s")
    if case.config.zero_stage:
        figure = f"an optimizer steps {outcome['share']:.0%} of them on rank 0 (at most {MOST_STEPPED:.0%})"
        report.check(f"{case.name}: parameters are spread", outcome["share"] <= MOST_STEPPED, figure)


def _furthest(values: Sequence[float], wanted: Sequence[float]) -> float:
    off = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(values, wanted, strict=True)]
    return max(math.inf if math.isnan(value) else value for value in off)


def compare_files(report: Report, case: Case, saved: Path, stock: Path) -> None:
    """What was saved before the first step is what Transformers saves of the same model, to the bit."""
    mine, theirs = _stored(saved), _stored(stock)
    if mine.keys() != theirs.keys():
        differing = sorted(mine.keys() ^ theirs.keys())
    else:
        differing = sorted(name for name, value in theirs.items() if not torch.equal(mine[name], value))
    figure = f"{len(differing)} of {len(theirs)} tensors differ {', '.join(differing[:3])}".strip()
    report.check(f"{case.name}: saved", not differing, figure)


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def check_kill(report: Report, name: str, folder: Path, dry: bool) -> None:
    """Rank 1 of a training run is killed; rank 0 ends by itself and says who it was."""
    mark = folder / "training"
    given = ["--folder", str(folder / "killed"), "--mark", str(mark), "--steps", "100000"]
    given += ["--plan", "greedy", *(["--dry"] if dry else [])]
    with Pair(TRAINER, given, folder, "killed", dry) as pair:
        end = time.monotonic() + 120
        while not mark.exists() and time.monotonic() < end and None in pair.statuses():
            time.sleep(0.1)
        if not mark.exists():
            print(pair.said(30), file=sys.stderr, flush=True)
            report.check(name, False, f"training did not start: {pair.said(1)}".replace("\n", "; "))
            return
        pair.processes[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        try:
            status = pair.processes[0].wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            status = 0
        seconds = time.monotonic() - killed
        said = [line for line in pair.logs[0].read_text(errors="replace").splitlines() if "rank 1" in line]
    named = next((line for line in said if "rank 1 died" in line), said[-1] if said else "nothing about rank 1")
    passed = status != 0 and seconds < END_LIMIT and bool(said)
    report.check(name, passed, f"rank 0 ended after {seconds:.1f} s (at most 60) and said: {named}")


def check_trainer(report: Report, name: str, folder: Path, dry: bool) -> None:
    """HelixTrainer on two ranks of torchrun, and the stock Trainer in one process: the losses they log."""
    flags = ["--dry"] if dry else []
    stock, helix = folder / "trainer-stock", folder / "trainer-helix"
    alone = [sys.executable, "-m", TRAINER, "--stock", "--folder", str(stock), *flags]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    launch += ["--master-port", str(free_port()), "-m", TRAINER, "--folder", str(helix), *flags]
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_HOSTID")
    environment = {key: value for key, value in environment_of(0, 0, dry).items() if key not in own}
    one = {} if dry else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}

    def ended(command: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=150)

    with ThreadPoolExecutor(1 if dry else 2) as threads:
        runs = list(threads.map(ended, (alone, launch), (one, {})))
    for command, done in zip((alone, launch), runs, strict=True):
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-8000:], file=sys.stderr, flush=True)
            last = [line for line in done.stderr.splitlines() if "Error" in line or line.startswith("hf_helix")]
            said = last[0] if last else ""
            report.check(name, False, f"{command[2]} ended with {done.returncode}: {said}")
            return
    wanted, figures = (json.loads((place / "losses.json").read_text()) for place in (stock, helix))
    off = _furthest(figures["losses"], wanted["losses"])
    evaluated = _furthest([figures["eval"]], [wanted["eval"]])
    figure = f"losses {off:.1e}, evaluation {evaluated:.1e} off the stock Trainer's (at most {CLOSE:.0e})"
    report.check(name, max(off, evaluated) <= CLOSE, f"{figure}; {figures['about']}")
    mine, theirs = _stored(helix), _stored(stock)
    apart = [float((mine[name] - value).norm() / value.norm()) for name, value in theirs.items() if name in mine]
    figure = f"{len(mine)} tensors, at most {max(apart, default=math.inf):.1e} off (at most {CLOSE:.0e})"
    close = mine.keys() == theirs.keys() and max(apart) <= CLOSE
    report.check(f"{name}: saved after training", close, figure)
