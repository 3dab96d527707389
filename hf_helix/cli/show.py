"""hf-helix show: draw a plan as a timeline, a profile as a table of overlap, a schedule as a pipeline.

In:   a plan with its profile, a profile, or the name of a schedule.
Out:  text, a page, or a picture.
Must hold: files are enough, without torch; only memory needs the model.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from hf_helix.cli.options import Command, argument, configuration_file, made_for, option, read_profile, schedule_for
from hf_helix.cli.plan import plan_by
from hf_helix.config import AUTO, RECOMPUTE, RULES
from hf_helix.planning.choice.scheduler import simulate_layers
from hf_helix.planning.choice.slot_clock import Simulated
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import Prediction, predict
from hf_helix.planning.rules.registry import load_plan
from hf_helix.planning.schedule.actions import num_microbatches_of
from hf_helix.planning.schedule.named import PLACEMENT_OF
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.profile_file import load_profile
from hf_helix.report import heatmap, page
from hf_helix.report.strands import draw_strips, note_of, strips_of_plans, text_strips
from hf_helix.report.timeline import bars_of_timeline, text_comparison, text_pipeline, text_ranks, text_timeline

TIMES = ("forward", "input", "weight", "transfer", "gain")
# Options of some kinds of drawings.
OF_SCHEDULES = ("pp", "layers", *TIMES)
OF_PLANS = ("profile", "compare", "recompute", "model", "output")
OF_BOTH = ("microbatches", "html")

COMPARED_MICROBATCHES = 8  # of the windows of compared plans


@dataclass(kw_only=True)
class ShowCommand(Command):
    """Draw a plan as a timeline, a profile as a table of overlap, or a schedule as a pipeline.

    examples:
      hf-helix show plan.json --profile profile.json                      a timeline in the terminal
      hf-helix show plan.json --profile profile.json --html page.html     the same as a page for a browser, and more
      hf-helix show plan.json --profile profile.json --html page.html --model FOLDER   with memory over the window
      hf-helix show plan.json --profile profile.json --compare sequential   two layers under both plans
      hf-helix show profile.json                                          the parts of the time, and good pairs
      hf-helix show --schedule folded_1f1b --pp 4 --microbatches 12       a pipeline, slot by slot
      hf-helix show --schedule all --gain 1.4                             all schedules next to each other

    The overlap efficiency (OEF) of two operators is (T_i + T_j - P_ij) / min(T_i, T_j), with their times alone and the
    time of both side by side (equation 1 of the DHelix paper). At 1 the shorter is hidden wholly behind the longer, at
    0 they take as long as one after the other, below 0 they hinder each other.
    """

    file: Path | None = argument(None, "a plan or a profile")
    profile: Path | None = option(None, "the profile whose times a plan is drawn with")
    compare: str | None = option(None, "draw two layers under this rule above two under the plan", choices=RULES)
    recompute: str | None = option(None, "as given when the plan was made", choices=RECOMPUTE[1:])
    microbatches: int | None = option(None, "micro-batches that are drawn: 3 of a plan, 3 * pp of a schedule")
    width: int = option(100, "columns of text")
    html: Path | None = option(None, "write a page for a browser instead of text: one file, .html")
    model: str | None = option(None, "the model that was profiled, as of `profile`: the page then has its memory")
    output: Path | None = option(None, "with --compare: the layers as a picture, .svg, .png or .pdf")
    schedule: str | None = option(
        None, "draw a schedule by its name in HelixConfig, or from a file of actions; all of them with `all`"
    )
    pp: int = option(4, "pipeline ranks of the schedule")
    layers: int | None = option(None, "layers of the model; left out, two for each rank")
    forward: float = option(1.0, "time of a layer's forward (F)")
    input: float = option(1.0, "time of a layer's input gradient (I)")
    weight: float = option(1.0, "time of a layer's weight gradients (W)")
    transfer: float = option(0.0, "time from a rank to the next")
    gain: float = option(1.0, "how many times faster forward and backward are side by side than in turn")

    def check_values(self) -> None:
        super().check_values()
        for name in TIMES:
            value, least = getattr(self, name), "0 or more" if name == "transfer" else "more than 0"
            if not (value > 0 or (value == 0 and name == "transfer")) or value == inf:
                raise ValueError(f"--{name} {value:g}: give {least}, such as --{name} 1")

    def run(self) -> None:
        """Text, or a page if `--html` is given."""
        if (self.file is None) == (self.schedule is None):
            raise ValueError(
                "show takes either a plan or a profile, or a schedule, such as --schedule 1f1b; give one of them"
            )
        if self.schedule is not None:
            self._refuse(OF_PLANS, "a schedule")
            return self._show_schedule(self.schedule)
        assert self.file is not None
        self._refuse(OF_SCHEDULES, "a file")
        if not self.file.is_file():
            raise ValueError(
                f"{self.file} is no file; `hf-helix profile` makes a profile, and `hf-helix plan` makes a plan from it"
            )
        try:
            data = json.loads(self.file.read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.file} is not JSON: {error}") from error
        kind = str(data.get("format", "")) if isinstance(data, dict) else ""
        if kind.startswith("hf_helix.profile/"):
            self._show_profile(self.file)
        elif kind.startswith("hf_helix.plan/"):
            self._show_plan(self.file)
        else:
            raise ValueError(f"{self.file} is neither a plan nor a profile (its format is {kind!r})")

    def _refuse(self, names: Sequence[str], what: str) -> None:
        """Refuses options without a meaning for the drawing."""
        given = [f"--{name}" for name in names if getattr(self, name) != getattr(type(self), name)]
        if given:
            raise ValueError(f"{' and '.join(given)} would mean nothing where {what} is drawn; leave it out")

    def _show_profile(self, file: Path) -> None:
        self._refuse((*OF_PLANS, *OF_BOTH), "a profile")
        profile = load_profile(file)
        about = "\n".join(f"{key}: {value}" for key, value in profile.about.items())
        print(about, heatmap.text_breakdown(profile), heatmap.text_heatmap(profile), sep="\n\n")

    def _show_plan(self, file: Path) -> None:
        microbatches = 3 if self.microbatches is None else self.microbatches
        if self.profile is None:
            raise ValueError("a plan is drawn with times: add --profile profile.json")
        profile = read_profile(self.profile, self.recompute)
        model, mesh = made_for(profile)
        plan = load_plan(file, profile.layout.graphs, model=model, mesh=mesh)
        if self.compare is not None:
            self._refuse(("microbatches",), "a comparison of two layers")
            other = plan_by(self.compare, profile, schedule_for(profile, COMPARED_MICROBATCHES))
            return self._show_strips([other, plan], profile)
        self._refuse(("output",), "one plan")
        schedule = schedule_for(profile, microbatches)
        if self.html is not None:
            return self._write(
                f"{model}, {profile.about['mesh']}",
                page.plan_parts(plan, profile, schedule, _measured(file), self._memory(profile, mesh)),
            )
        self._refuse(("model",), "text")
        predicted = predict(plan, profile, schedule, timeline=True)
        bars = bars_of_timeline(predicted.timeline, predicted.instructions)
        title = f"{plan.rule}: {microbatches} micro-batches, predicted {predicted.seconds * 1e3:,.1f} ms"
        print(title, text_timeline(bars, self.width), sep="\n")

    def _memory(self, profile: Profile, mesh: dict[str, int]) -> Callable[[Prediction], page.WindowMemory] | None:
        """The function for the memory of a predicted window, if the model is given."""
        if self.model is None:
            return None
        from hf_helix.doctor.page import memory_of_run

        return functools.partial(memory_of_run, configuration_file(str(self.model)), profile, mesh)

    def _write(self, title: str, parts: Sequence[page.Part]) -> None:
        assert self.html is not None
        page.write_page(self.html, title, parts)
        print(self.html)

    def _show_strips(self, plans: Sequence[Plan], profile: Profile) -> None:
        self._refuse(("model",), "a comparison of two layers")
        shown, title = strips_of_plans(profile, plans), f"two decoder layers ({note_of(profile)})"
        if self.html is not None:
            self._write(title, [page.window_part({strip.title: strip.bars for strip in shown})])
        if self.output is not None:
            draw_strips(shown, self.output, note_of(profile))
            print(self.output)
        if self.html is self.output is None:
            print(title, text_strips(shown, self.width), sep="\n")

    def _show_schedule(self, name: str) -> None:
        if name == "all":
            if self.html is not None:
                raise ValueError("--schedule all is a table; for a page name one schedule, such as --schedule auto")
            print(text_comparison(dict(self._simulated(each) for each in (*PLACEMENT_OF, AUTO))))
            return
        label, simulated = self._simulated(name)
        count = num_microbatches_of(simulated.schedule)
        title = f"{label}: {self.pp} ranks, {count} micro-batches, time {simulated.seconds:,.6g}"
        if self.html is None:
            print(title, text_pipeline(simulated, self.width), text_ranks(simulated), sep="\n\n")
        else:
            self._write(title, [page.pipeline_part(simulated, label)])

    def _simulated(self, name: str) -> tuple[str, Simulated]:
        """A schedule by name or file, and its label, run on a clock with the times of the command line."""
        times = {key: getattr(self, key) for key in TIMES}
        label, simulated = simulate_layers(name, self.pp, self.microbatches, self.layers, **times)
        return name if label == name else f"{name} ({label})", simulated


def _measured(plan: Path) -> str:
    """The texts that a run wrote next to its plan, if any."""
    beside = plan.with_name("tuning.txt")
    return beside.read_text().strip() if beside.is_file() else ""
