"""Which plan a run uses, and when it is decided.

In:   the configuration, what the run is for, and the first window.
Out:  a plan before anything runs; after the first window, the one that was measured to be the fastest.
Must hold: every rank decides the same; what was measured is said, once, by rank 0, and kept on disk.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from hf_helix import __version__, cache
from hf_helix.config import SCHEDULES, HelixConfig
from hf_helix.planning.plan import Plan, load_plan, parse_plan
from hf_helix.planning.profile import Profile, load_profile, rough_profile
from hf_helix.planning.recompute import NONE
from hf_helix.planning.rules import RULES
from hf_helix.planning.scheduler import Scheduler, candidates, stage_costs
from hf_helix.planning.window import Layout
from hf_helix.report.progress import progress_bar
from hf_helix.report.scorecard import format_tuning
from hf_helix.runtime.agreement import agree_on_text
from hf_helix.runtime.measure import over_ranks
from hf_helix.runtime.mesh import Mesh, rank
from hf_helix.runtime.profiler import machine
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.strand import MicroBatch
from hf_helix.runtime.tuning import BASELINE, CANDIDATES, Tuning, make_plans, tune

# Rules that wait for a measurement in the first window; until then, a plan that needs none serves.
MEASURED = {"auto": CANDIDATES, "search": ("search",), "dhelix": ("dhelix",)}
UNMEASURED = "greedy"
TUNED_MICROBATCHES = 4  # for each rank of the pipeline: enough to see the steady state


def describe(
    model: Any, mesh: Mesh, products: torch.dtype | None = None, recompute: Sequence[str] = ()
) -> dict[str, str]:
    """What measurements of a model are for; before it is cut.

    Args:
        products: see `Runner`.
        recompute: the mode of every layer, see `hf_helix.recompute`.
    """
    weights = [
        (name, tuple(weight.shape), str(weight.dtype), *(() if weight.requires_grad else ("frozen",)))
        for name, weight in model.named_parameters()
    ]
    shared = [(name, mesh.sizes[name]) for name in ("tp", "pp", "cp", "ep")]
    digest = hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]
    runs = [f"{mode} x {len(list(found))}" for mode, found in itertools.groupby(recompute)]
    again = {} if set(recompute) <= {NONE} else {"recompute": recompute[0] if len(runs) == 1 else ", ".join(runs)}
    return {
        "model": f"{type(model).__name__} {digest}" + (f" {products}".replace("torch.", "") if products else ""),
        "mesh": " ".join(f"{name}={size}" for name, size in shared if size > 1 or name == "tp"),
        "attention": str(model.config._attn_implementation),
        **again,
        "transformers": version("transformers"),
        "hf_helix": __version__,
    }


def digest_of(path: str | None) -> str:
    """A fingerprint of a file; empty without one."""
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def options_of(config: HelixConfig) -> str:
    """What ranks must have in common, a line for each option; the plan is compared by itself, once it is made.

    Files may lie elsewhere on another host, so what is in them counts.
    """
    values = dataclasses.asdict(config)
    del values["plan"]
    values["profile"] = digest_of(config.profile)
    if config.schedule not in SCHEDULES:
        values["schedule"] = Path(config.schedule).read_text().strip()
    return "\n".join(f"{name}={value}" for name, value in values.items())


class Tuner:
    """Chooses the plan of a run.

    Args:
        model: the model's class, for plan files.
        about: what measurements are for, see `describe`.
    """

    def __init__(self, config: HelixConfig, model: str, about: Mapping[str, str]) -> None:
        self.config = config
        self.tuning: Tuning | None = None
        self._model = model
        self._mesh = {name: getattr(config, name) for name in ("tp_size", "pp_size")}
        self._mesh |= {name: getattr(config, name) for name in ("cp_size", "ep_size") if getattr(config, name) > 1}
        self._about = about
        self._said_untuned = False
        self.scheduler = Scheduler(config.schedule, config.pp_size)

    def first_plan(self, layout: Layout) -> Plan:
        """The plan that the run starts with. Collective.

        Raises:
            ValueError: a plan or profile file that is damaged or for something else.
        """
        name = self.config.plan
        is_file = name not in MEASURED and name not in RULES
        # Files may lie elsewhere on another host; what is in them is compared with the plan.
        kinds = ("a file" if is_file else name, self.config.without, self.config.profile is not None)
        placed = f"plan={kinds[0]!r}\nwithout={kinds[1]!r}\nprofile given: {kinds[2]}\n{layout.describe()}"
        agree_on_text(placed, "plans")
        profile = self._given_profile(layout)
        if profile is not None:
            self.scheduler = Scheduler(self.config.schedule, self.config.pp_size, stage_costs(profile))
        if is_file:
            return load_plan(name, layout.graphs, model=self._model, mesh=self._mesh)
        if name in MEASURED and profile is None:
            # One rank has nothing to hide, and one strand at a time is kinder to the caches.
            name = UNMEASURED if self.config.communicates else BASELINE
        if name == "auto":
            name = UNMEASURED
        plans = make_plans([name], profile or rough_profile(layout), model=self._model, mesh=self._mesh)
        return plans[name]

    def decide(self, runner: Runner, window: Sequence[MicroBatch]) -> Runner:
        """The runner to go on with; measures with the first window of two micro-batches or more. Collective."""
        if self._is_settled():
            return runner
        if min(over_ranks(len(window))) < 2:
            self._say_untuned(runner)
            return runner
        whole, window = len(window), window[: TUNED_MICROBATCHES * self.config.pp_size]
        about = {**machine(runner), **self._about, "shapes": ", ".join(batch.shape for batch in window)}
        case = {**about, "plan": self.config.plan, "without": " ".join(self.config.without)}
        case |= {"profile": digest_of(self.config.profile), "schedule": self.config.schedule}
        found = self._recall(case, runner) if self.config.cache else None
        chosen, self.tuning = found or self._measure(runner, window, whole, about, case)
        if rank() == 0:
            tqdm.write(format_tuning(self.tuning, len(window) / whole))
        return chosen

    def _is_settled(self) -> bool:
        rules = MEASURED.get(self.config.plan)
        known = self.config.plan != "auto" and self.config.profile is not None
        return rules is None or known or self.tuning is not None or not self.config.communicates

    def _given_profile(self, layout: Layout) -> Profile | None:
        if self.config.profile is None:
            return None
        wanted: dict[str, str] = {key: self._about[key] for key in ("model", "mesh")}
        return load_profile(self.config.profile, about=wanted, layout=layout, without=self.config.without)

    def _measure(
        self,
        runner: Runner,
        window: Sequence[MicroBatch],
        whole: int,
        about: Mapping[str, str],
        case: Mapping[str, str],
    ) -> tuple[Runner, Tuning]:
        with progress_bar(rank() == 0) as progress:
            chosen, tuning = tune(
                runner,
                window,
                MEASURED[self.config.plan],
                about=about,
                profile=self._given_profile(runner.whole.layout),
                schedules=functools.partial(candidates, self.config.schedule),
                microbatches=whole,
                progress=progress,
            )
        tuning = dataclasses.replace(tuning, measured=cache.today())
        if rank() == 0 and self.config.cache:
            try:
                cache.store(case, tuning, chosen.plan.to_json())
            except OSError as error:
                tqdm.write(f"hf_helix: what was measured could not be kept for the next run: {error}")
        return chosen, tuning

    def _recall(self, case: Mapping[str, str], runner: Runner) -> tuple[Runner, Tuning] | None:
        """What an earlier run measured, if rank 0 finds it."""
        box = [cache.load(case) if rank() == 0 else None]
        if dist.is_initialized():
            dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return None
        tuning, text = box[0]
        try:
            plan = parse_plan(text, runner.whole.layout.graphs, model=self._model, mesh=self._mesh)
        except ValueError:
            return None  # of an older version: the same on every rank
        costs = stage_costs(tuning.profile) if tuning.profile is not None else None
        return runner.with_plan(plan, Scheduler(tuning.schedule, self.config.pp_size, costs)), tuning

    def _say_untuned(self, runner: Runner) -> None:
        if rank() == 0 and not self._said_untuned:
            self._said_untuned = True
            tqdm.write(
                f"hf_helix: plan={self.config.plan!r} waits for a window of two micro-batches; until then "
                f"{runner.plan.rule} serves. Set gradient_accumulation_steps to 2 or more"
            )
