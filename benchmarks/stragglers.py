"""Slow ranks: how often a run names the right one, how often it names one for no reason, and what the looks cost.

Trains a Llama with the Trainer over an emulated link, on ranks of this machine that share its cores. The studies:

    named     cases in turn, with clean windows between them: a rank and a fault are drawn, and the fault lasts `window`
              windows. A case is right if the line that rank 0 prints within them has the rank and the cause
    clean     a run without faults: every line is an alarm for no reason
    overhead  windows with and without looks in turn, some of each: the median of the ratios of neighbours, with the
              interval that holds it in 95 of 100 draws of as many ratios (bootstrap)

The faults:

    core      every operator of the rank takes 1.3 times as much of its core
    link      the rank's link has half its rate
    data      the worker of the rank's data loader takes a second longer for a window than the others do
    host      the rank stands still: a signal stops the process, or a collection looks at millions of objects

    python -m benchmarks.stragglers named --cases 100
    python -m benchmarks.stragglers clean --windows 1000
    python -m benchmarks.stragglers overhead
"""

import argparse
import ctypes
import gc
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from benchmarks.common import add_outputs, columns, facts, options_of, save
from benchmarks.ranks import Ranks
from benchmarks.trainers import RandomTokens, make_model
from hf_helix import HelixConfig, HelixTrainer

SLOWER, RATE = 1.3, 0.5  # of a core's time, and of a link's rate
LATE = 1.2  # of a window's time, for the data of a window
STOPPED, PERIOD = 0.15, 0.5  # seconds that a process stands still, in this many
OBJECTS = 1_500_000  # that a collection looks at
CAUSES = {"core": "computing slower", "link": "link slower", "data": "data late", "host": "host busy"}
THREADS = ("hf_helix-looks", "hf_helix-pauses")
WARMUP = 13  # windows; the next has a look if ranks look at every 1, 2, 3, 4 or 6, so a turn compares its own looks


def main() -> None:
    model = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 4, "vocabulary": 1024, "sequence": 128}
    run = {"batch": 2, "accumulation": 4, "ranks": 4, "tp_size": 2, "link": "400mbit", "windows": 1000, "turn": 4}
    parser = options_of(__doc__, **model, **run, cases=100, window=5, quiet=5, seed=0)
    parser.add_argument("study", choices=STUDIES)
    add_outputs(parser)
    options = parser.parse_args()
    options.intermediate = options.hidden * 11 // 4
    Ranks(options.ranks).run(work, options)


def work(options: argparse.Namespace) -> None:
    """One rank."""
    transformers.logging.set_verbosity_error()
    text, result = STUDIES[options.study](options)
    if options.rank == 0:
        print("\n".join([text, *(f"{name}: {value}" for name, value in facts().items())]))
        save(options, f"Slow ranks: {options.study}", __doc__, text, result)


# -- faults --------------------------------------------------------------------------------------------------------


class Core:
    """A core that is slower: every operator takes more of it."""

    is_slow = False

    @classmethod
    def install(cls) -> None:
        """Wraps every operator that runs from now on."""
        from hf_helix.runtime.executor import BoundComputation

        stock = BoundComputation.__init__

        def init(self: Any, *args: Any) -> None:
            stock(self, *args)
            self.run = cls._slowed(self.run)

        BoundComputation.__init__ = init  # type: ignore[method-assign]

    @classmethod
    def _slowed(cls, run: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any) -> Any:
            start = time.thread_time()
            result = run(*args)
            if cls.is_slow:
                end = start + SLOWER * (time.thread_time() - start)
                while time.thread_time() < end:
                    pass
            return result

        return slowed


class SlowTokens(RandomTokens):
    """Samples that may be late, also in a worker."""

    def __init__(self, *given: int) -> None:
        super().__init__(*given)
        self.seconds = torch.zeros(()).share_memory_()

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        time.sleep(float(self.seconds))
        return super().__getitem__(place)


class Stops:
    """Signals that stop this process for a moment, again and again, by another process."""

    def begin(self) -> None:
        parent, self._child = os.getpid(), os.fork()
        if self._child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            while True:
                os.kill(parent, signal.SIGSTOP)
                time.sleep(STOPPED)
                os.kill(parent, signal.SIGCONT)
                time.sleep(PERIOD - STOPPED)

    def end(self) -> None:
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.kill(os.getpid(), signal.SIGCONT)


class Collections:
    """Collections of garbage among many objects, in a thread."""

    def begin(self) -> None:
        self._objects: list[Any] = [[] for _ in range(OBJECTS)]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD - STOPPED):
            gc.collect()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._objects = []


@dataclass(frozen=True)
class Case:
    """A fault of a rank in some windows."""

    fault: str
    rank: int
    first: int
    last: int

    def has(self, window: int) -> bool:
        """Whether the fault is there in a window."""
        return self.first <= window <= self.last


def draw_cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases of a run, as many of each fault, with windows without faults before each."""
    draw, length = random.Random(options.seed), options.window + options.quiet
    names = [name for name in CAUSES for _ in range(options.cases // len(CAUSES))]
    draw.shuffle(names)
    firsts = (length * place + options.quiet + 1 for place in range(len(names)))
    return [
        Case(name, draw.randrange(options.ranks), first, first + options.window - 1)
        for name, first in zip(names, firsts, strict=True)
    ]


class Faults(TrainerCallback):
    """Begins and ends the faults of this rank."""

    def __init__(self, options: argparse.Namespace, cases: Sequence[Case], data: SlowTokens) -> None:
        self.options, self.cases, self.data = options, cases, data
        self.trainer: Any = None
        self.ends: list[float] = []
        self._end: Callable[[], object] = lambda: None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        for place, case in enumerate(self.cases):
            if case.rank == self.options.rank and state.global_step == case.first - 1:
                self._end = self._begin(case, place)
            if case.rank == self.options.rank and state.global_step == case.last:
                self._end()

    def _begin(self, case: Case, place: int) -> Callable[[], object]:
        """Begins a fault; returns the function that ends it."""
        if case.fault == "core":
            Core.is_slow = True
            return lambda: setattr(Core, "is_slow", False)
        if case.fault == "link":
            link = self.trainer.helix.mesh.link
            link.rate, before = RATE * link.rate, link.rate
            return lambda: setattr(link, "rate", before)
        if case.fault == "data":
            window = statistics.median(later - earlier for earlier, later in itertools.pairwise(self.ends[-6:]))
            self.data.seconds.fill_(LATE * window / (self.options.batch * self.options.accumulation))
            return lambda: self.data.seconds.fill_(0.0)
        fault = Stops() if place % 2 else Collections()
        fault.begin()
        return fault.end


def train(options: argparse.Namespace, windows: int, cases: Sequence[Case] = (), *callbacks: Any) -> tuple[Any, Faults]:
    """Trains windows with faults; returns the trainer and the callback with its times."""
    data = SlowTokens(512, options.sequence, options.vocabulary)
    faults = Faults(options, cases, data)
    folder = tempfile.mkdtemp()
    args = transformers.TrainingArguments(
        folder,
        max_steps=windows,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        dataloader_num_workers=1,
        dataloader_prefetch_factor=2,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    config = HelixConfig(tp_size=options.tp_size, plan="greedy", link=options.link)
    given: dict[str, Any] = {"model": make_model(options), "args": args, "train_dataset": data}
    trainer = HelixTrainer(**given, helix_config=config, callbacks=[faults, *callbacks])
    for each in (faults, *callbacks):
        each.trainer = trainer
    trainer.train()
    time.sleep(1)  # the last look is compared
    return trainer, faults


# -- studies -------------------------------------------------------------------------------------------------------


def name_faults(options: argparse.Namespace) -> tuple[str, Any]:
    Core.install()
    cases = draw_cases(options)
    trainer, faults = train(options, cases[-1].last + options.quiet, cases)
    named = trainer.helix.session.looks.named
    found = {case: [each for each in named if case.has(each.window)] for case in cases}
    right = {
        case: each[0].window - case.first + 1
        for case, each in found.items()
        if each and each[0].verdict.about == ((case.rank,), CAUSES[case.fault])
    }
    rows = [(fault, *_row([case for case in cases if case.fault == fault], right, found)) for fault in CAUSES]
    wrong = [f"{case}: {[str(each.verdict) for each in found[case]]}" for case in cases if case not in right]
    # A verdict rests on two looks, so the first after a fault may still be of it.
    looks = 2 * trainer.helix.session.looks.every
    others = [each for each in named if not any(case.first <= each.window <= case.last + looks for case in cases)]
    lines = [
        columns(("fault", "cases", "rank and cause right", "windows until then, median"), rows),
        f"right: {len(right)} of {len(cases)}; verdicts in windows without faults: {len(others)}",
        *[f"window {each.window}: {each.verdict}" for each in others],
        *wrong,
        _about(trainer, faults),
    ]
    return "\n".join(lines), {"right": len(right), "cases": len(cases), "others": len(others)}


def _row(cases: Sequence[Case], right: Mapping[Case, int], found: Mapping[Case, Any]) -> tuple[str, str, str]:
    windows = [right[case] for case in cases if case in right]
    return str(len(cases)), str(len(windows)), f"{statistics.median(windows):.0f}" if windows else ""


def train_cleanly(options: argparse.Namespace) -> tuple[str, Any]:
    trainer, faults = train(options, options.windows)
    named = trainer.helix.session.looks.named
    lines = [f"alarms in {options.windows} windows without faults: {len(named)}"]
    lines += [f"window {each.window}: {each.verdict}" for each in named]
    return "\n".join([*lines, _about(trainer, faults)]), {"alarms": len(named), "windows": options.windows}


def _about(trainer: Any, faults: Faults) -> str:
    seconds = [later - earlier for earlier, later in itertools.pairwise(faults.ends)]
    return (
        f"a window took {statistics.median(seconds):.2f} s (median; {min(seconds):.2f} to {max(seconds):.2f}), and "
        f"ranks looked at every {trainer.helix.session.looks.every}. window"
    )


class Turns(TrainerCallback):
    """Windows with and without looks in turn; the time and the cores' time of each."""

    def __init__(self, length: int, warmup: int) -> None:
        self.trainer: Any = None
        self._length, self._warmup = length, warmup
        self.walls: dict[bool, list[float]] = defaultdict(list)
        self.cores: dict[bool, list[float]] = defaultdict(list)
        self.ratios: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin = time.perf_counter(), time.process_time()
        later = state.global_step - self._warmup
        self._looks = later < 0 or later // self._length % 2 == 0
        self.trainer.helix.session.looks.is_paused = not self._looks

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > self._warmup:
            self.walls[self._looks].append(time.perf_counter() - self._begin[0])
            self.cores[self._looks].append(time.process_time() - self._begin[1])


def measure_overhead(options: argparse.Namespace) -> tuple[str, Any]:
    turns = Turns(options.turn, WARMUP)
    before = seconds_of_threads()
    trainer, faults = train(options, options.windows + WARMUP, (), turns)
    threads = sum(seconds_of_threads().values()) - sum(before.values())
    rows, result = [], {}
    for name, times in (("time", turns.walls), ("time of cores", turns.cores)):
        on, off = (_means(times[has], options.turn) for has in (True, False))
        ratios = [first / second for first, second in zip(on, off, strict=False)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        quartiles = f"{low:.4f} to {high:.4f}"
        least, most = _interval(ratios)
        rows.append((name, f"{middle:.4f}", f"{least:.4f} to {most:.4f}", quartiles, str(len(ratios))))
        result[name] = ratios
    seconds = faults.ends[-1] - faults.ends[0]
    lines = [
        f"windows with looks over windows without, {options.turn} of each in turn, on rank 0",
        columns(("a window's", "ratio, median", "95 %", "quartiles", "pairs"), rows),
        f"cores' time of the threads that look and watch: {threads / seconds:.2%} of the run's time",
        f"alarms: {len(trainer.helix.session.looks.named)}",
        _about(trainer, faults),
    ]
    return "\n".join(lines), result


def _interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Returns the bounds of the median in 95 of 100 draws."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def _means(values: Sequence[float], length: int) -> list[float]:
    """Returns the means of parts of a length."""
    return [statistics.mean(values[start : start + length]) for start in range(0, len(values), length)]


def seconds_of_threads() -> dict[str, float]:
    """Returns the cores' seconds of the threads of looks, by name."""
    found: dict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        if thread.name in THREADS:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found[thread.name] += int(text.split()[0]) / 1e9
    return found


STUDIES: Mapping[str, Callable[[argparse.Namespace], tuple[str, Any]]] = {
    "named": name_faults,
    "clean": train_cleanly,
    "overhead": measure_overhead,
}

if __name__ == "__main__":
    main()
