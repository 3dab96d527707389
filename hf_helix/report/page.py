"""Pages: windows, pipelines, layouts and pairs of operators, in one HTML file that needs no network.

In:   bars of a window, its memory over time, simulated schedules, a profile, amounts by name and part.
Out:  `Part`s of a page, and a file with all of them and the library that draws them.
Must hold: bokeh and numpy are imported inside functions only; everything is to scale; every rectangle names its
operator, its times, and the operators that run at the same time.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hf_helix.planning.choice.slot_clock import Simulated, simulate_schedule, stage_costs
from hf_helix.planning.plan.bounds import lower_bound
from hf_helix.planning.plan.plan import Plan
from hf_helix.planning.plan.predict import Prediction, predict
from hf_helix.planning.rules.registry import baseline_plan
from hf_helix.planning.schedule.actions import Schedule, num_microbatches_of
from hf_helix.planning.timing.profile import Profile
from hf_helix.report.figures import COLOURS, EMPTY, FAINT, INK
from hf_helix.report.heatmap import text_breakdown, text_heatmap
from hf_helix.report.timeline import MEANING, Bar, bars_of_timeline, chunk_of, rows_of, summary_of, text_ranks

WIDTH, ROW = 1150, 30  # pixels
PARTS = {
    "computation": "#2e6fae",
    "exposed intra_node": "#b7a1d6",
    "exposed inter_node": "#e07a5a",
    "exposed pipeline": "#8fb35c",
    "exposed host_up": "#5fb3b3",
    "exposed host_down": "#3c7d7d",
    "bubble": "#c2c8cf",
    "rest": "#8a929c",
    "sums of gradients": "#f2b84b",
    "optimizer": "#5a3d2b",
    "weights": "#2e6fae",
    "gradients": "#f2b84b",
    "states": "#5a3d2b",
    "copies": "#8fa3b5",
    "activations": "#d1603d",
    "buffers": "#7a9a4c",
}
"""The colour of each part of a step and of a device's memory, the same on every page."""

SPARE = ("#6a4c93", "#a9cbe8", "#f3bda8", "#cbdcb0", "#4c5563")
"""The colours of other parts, in their order."""

EXPOSED = "exposed"
"""Begins the names of parts that are hatched: communication that nothing hides."""

FEW = 1_000  # rectangles that can be distinguished without zooming
NAMED = 2  # most operators named with another
STYLE = f"""body {{font: 14px sans-serif; margin: 24px; color: {INK}}} h2 {{margin: 28px 0 4px}}
p {{max-width: 110ch}} pre {{font-size: 12px; white-space: pre-wrap}}"""


@dataclass(frozen=True)
class Part:
    """A section of a page: a heading, a sentence on how to read it, text in columns, and figures of bokeh."""

    heading: str
    note: str = ""
    text: str = ""
    figures: Sequence[Any] = ()


@dataclass(frozen=True)
class WindowMemory:
    """Bytes of a rank during a window, by part, at the given seconds."""

    rank: int
    seconds: Sequence[float]
    parts: Mapping[str, Sequence[float]]


def write_page(path: str | Path, title: str, parts: Sequence[Part]) -> None:
    """Saves a page of sections, an .html file.

    Args:
        path: of the file.
        title, parts: its title and its sections.

    Raises:
        ValueError: another suffix.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"cannot write a page to {str(path)!r}: its name must end with .html, such as page.html")
    from bokeh.embed import components
    from bokeh.resources import Resources

    figures = [figure for part in parts for figure in part.figures]
    script, made = components(figures)
    divs = iter(made)
    body = [f"<h1>{escape(title)}</h1>"]
    for part in parts:
        body += [f"<h2>{escape(part.heading)}</h2>", f"<p>{escape(part.note)}</p>"]
        body += [f"<pre>{escape(part.text)}</pre>"] if part.text else []
        body += [next(divs) for _ in part.figures]
    library = Resources(mode="inline", components=["bokeh"]).render()
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>{library}'
    page = ["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, script, "</body></html>"]
    Path(path).write_text("\n".join(page))


# -- parts -------------------------------------------------------------------------------------------------------------


def window_part(windows: Mapping[str, Sequence[Bar]], memory: WindowMemory | None = None) -> Part:
    """Returns the timelines of windows by title, on one axis, and the memory of the first.

    Raises:
        ValueError: no bar takes any time.
    """
    figures: list[Any] = []
    for title, bars in windows.items():
        shared = {"x_range": figures[0].x_range} if figures else {}
        rows = rows_of([bar for bar in bars if bar.seconds > 0])
        beside = _beside(rows.values())
        figure = _figure(f"{title}: {summary_of(bars)}", list(rows), **shared)
        boxes = [
            _box(
                (place - 0.42, 0.84, bar.start * 1e3, bar.end * 1e3),
                (COLOURS[bar.letter], MEANING[bar.letter]),
                operator=bar.label,
                beside=beside.get(id(bar), "nothing"),
            )
            for place, mine in enumerate(rows.values())
            for bar in mine
        ]
        times = "@left{0,0.000} to @right{0,0.000} ms, @took{0,0.000} ms"
        _draw(figure, boxes, {"operator": "@operator", "": "@kind", "time": times, "beside": "@beside"})
        figures.append(figure)
    if memory is not None:
        figures.append(_memory_figure(memory, figures[0].x_range))
    note = "The wheel zooms, dragging moves. An operator names those beside it: what hides it, or what it hides."
    return Part("The window", note, figures=figures)


def plan_parts(
    plan: Plan,
    profile: Profile,
    schedule: Schedule,
    measured: str = "",
    memory: Callable[[Prediction], WindowMemory | None] | None = None,
) -> list[Part]:
    """Returns the sections on a window under a plan: its times, timeline, pipeline and operators, below what a run
    measured, as text; `memory` gives the memory of the predicted window."""
    predicted = predict(plan, profile, schedule, timeline=True)
    one_strand = predict(baseline_plan(profile.layout, model=plan.model, mesh=plan.mesh), profile, schedule).seconds
    bars, count = bars_of_timeline(predicted.timeline, predicted.instructions), num_microbatches_of(schedule)
    text = (
        f"{count} micro-batches, predicted:\n"
        f"  plan {plan.rule:<12} {predicted.seconds * 1e3:10,.1f} ms\n"
        f"  one strand        {one_strand * 1e3:10,.1f} ms   {one_strand / predicted.seconds:.2f}x as long\n"
        f"  no plan can beat  {lower_bound(profile, schedule) * 1e3:10,.1f} ms"
    )
    return [
        Part("The scorecard", text="\n\n".join(filter(None, [measured, text]))),
        window_part({f"plan {plan.rule}, predicted": bars}, memory(predicted) if memory else None),
        *schedule_parts(profile, schedule),
        Part("The operators", text=f"{text_breakdown(profile)}\n\n{text_heatmap(profile)}"),
    ]


def schedule_parts(profile: Profile, schedule: Schedule) -> list[Part]:
    """Returns the schedule on the ranks of a profile; nothing for one rank."""
    if profile.layout.num_ranks == 1:
        return []
    simulated = simulate_schedule(schedule, tuple(profile.layout.ranks), stage_costs(profile))
    return [pipeline_part(simulated, f"slot by slot, at the best overlap: {simulated.bubble:.1%} bubble", "ms", 1e3)]


def pipeline_part(simulated: Simulated, title: str, unit: str = "", scale: float = 1.0) -> Part:
    """Returns the slots of a schedule, rank by rank, and the memory of each rank in parts of a stage; a second of
    `simulated` has `scale` units of the axis."""
    names = [f"rank {rank}, {bubble:.1%} idle" for rank, bubble in enumerate(simulated.bubbles)]
    figure = _figure(title, names, unit)
    boxes = []
    for rank, slots in enumerate(simulated.schedule):
        for slot, start, end in zip(slots, simulated.starts[rank], simulated.ends[rank], strict=True):
            for place, action in enumerate(slot.actions):  # fused slots are cut in halves, forward above
                tall, chunk = 0.84 / len(slot.actions), chunk_of(simulated, action)
                letter = action.computation_type.replace("I", "B")
                kind = MEANING[letter] + (f", chunk {chunk}" if letter in "FB" else "")
                colour = COLOURS[letter.lower() if chunk and letter in "FB" else letter]
                place_and_time = rank - 0.42 + place * tall, tall, start * scale, end * scale
                boxes.append(_box(place_and_time, (colour, kind), operator=str(action)))
    times = f"@left{{0,0.000}} to @right{{0,0.000}} {unit}"
    _draw(figure, boxes, {"action": "@operator", "": "@kind", "time": times})
    note = "Fused slots are cut in halves, forward above; a stage-share is what a micro-batch keeps on an average rank."
    return Part("The pipeline", note, text_ranks(simulated), [figure])


def stacked(rows: Mapping[str, Mapping[str, float]], title: str, unit: str) -> Any:
    """Returns a figure with a bar of parts for every row, in a unit; hovering gives the value of a part."""
    names = list(dict.fromkeys(part for values in rows.values() for part in values))
    figure, colours = _figure(title, list(rows), unit), colours_of_parts(names)
    boxes = []
    for place, values in enumerate(rows.values()):
        left = 0.0
        for part in (name for name in names if values.get(name)):
            hatch = "right_diagonal_line" if part.startswith(EXPOSED) else "blank"
            where = place - 0.36, 0.72, left, left + values[part]
            boxes.append(_box(where, (colours[part], part), hatch=hatch))
            left += values[part]
    _draw(figure, boxes, {"": "@kind", unit: "@took{0,0.000}"})
    return figure


def colours_of_parts(names: Sequence[str]) -> dict[str, str]:
    """Returns the colour of each of some parts, a colour of its own."""
    others = [name for name in names if name not in PARTS]
    return {name: PARTS[name] if name in PARTS else SPARE[others.index(name) % len(SPARE)] for name in names}


# -- figures -----------------------------------------------------------------------------------------------------------


def _figure(title: str, rows: Sequence[str], unit: str = "ms", **options: Any) -> Any:
    """An empty figure with a row for every name, zoomed along the horizontal axis."""
    try:
        from bokeh.plotting import figure
    except ImportError as error:
        raise ImportError("pages need bokeh, of the extra `html`: pip install bokeh") from error

    made = figure(
        title=title,
        width=WIDTH,
        height=ROW * max(2, len(rows)) + 120,
        y_range=(len(rows) - 0.5, -0.5),
        tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
        active_scroll="xwheel_zoom",
        toolbar_location="above",
        background_fill_color=EMPTY,
        **options,
    )
    if rows:
        made.yaxis.ticker = list(range(len(rows)))
        made.yaxis.major_label_overrides = dict(enumerate(rows))
    made.min_border_left, made.x_range.range_padding = 130, 0.01
    made.xaxis.axis_label = unit
    made.ygrid.visible = False
    made.outline_line_color = FAINT
    return made


def _box(where: tuple[float, float, float, float], looks: tuple[str, str], **tells: str) -> dict[str, Any]:
    """A rectangle: its top, height, start and end; its colour and the legend of that; what it tells."""
    top, tall, left, right = where
    box = {"top": top, "bottom": top + tall, "left": left, "right": right, "took": right - left}
    return {**box, "colour": looks[0], "kind": looks[1], **tells}


def _draw(figure: Any, boxes: Sequence[Mapping[str, Any]], tips: Mapping[str, str]) -> None:
    """Draws rectangles with a tip for each, and a legend by `kind`."""
    import numpy as np
    from bokeh.models import ColumnDataSource, HoverTool

    columns = {name: [box[name] for box in boxes] for name in boxes[0]}
    numbers = ("top", "bottom", "left", "right", "took")
    source = ColumnDataSource({n: np.asarray(v, "float32") if n in numbers else v for n, v in columns.items()})
    places = {name: name for name in numbers[:4]}
    edge = "white" if len(boxes) < FEW else None  # edges would hide narrow ones
    hatched = {"hatch_pattern": {"field": "hatch"}, "hatch_color": "white"} if "hatch" in columns else {}
    drawn = figure.quad(
        **places,
        **hatched,
        source=source,
        fill_color="colour",
        line_color=edge,
        hover_line_color=INK,
        legend_group="kind",
    )
    figure.add_tools(HoverTool(renderers=[drawn], tooltips=list(tips.items()), point_policy="follow_mouse"))
    _legend_below(figure)


def _legend_below(figure: Any) -> None:
    figure.add_layout(figure.legend[0], "below")
    figure.legend.orientation, figure.legend.location, figure.legend.ncols = "horizontal", "left", 6
    figure.legend.border_line_color, figure.legend.margin, figure.legend.padding = None, 0, 2


def _memory_figure(memory: WindowMemory, x_range: Any) -> Any:
    """The memory of a rank by part, in steps: a value holds until the next second."""
    from bokeh.models import HoverTool

    figure = _figure(f"memory of rank {memory.rank} by part (GB)", [], x_range=x_range)
    times = [1e3 * second for second in memory.seconds for _ in range(2)][1:]
    parts = {name: [v / 1e9 for v in values for _ in range(2)][:-1] for name, values in memory.parts.items()}
    parts = {name: values for name, values in parts.items() if any(values)}
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    colours = list(colours_of_parts(list(parts)).values())
    source = {"ms": times, "total": totals, **parts}
    figure.varea_stack(list(parts), x="ms", source=source, color=colours, legend_label=list(parts))
    line = figure.line("ms", "total", source=source, color=INK, line_width=1)
    tips = [("ms", "@ms{0,0.000}"), *((name, f"@{name}{{0,0.000}} GB") for name in (*parts, "total"))]
    figure.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline", line_policy="prev"))
    figure.y_range.start, figure.y_range.end, figure.height = 0.0, 1.05 * max(totals), 260
    _legend_below(figure)
    return figure


def _beside(rows: Iterable[Sequence[Bar]]) -> dict[int, str]:
    """The operators at the time of each bar on its rank, in words, by the bar's id: computation with communication, and
    the other way round."""
    found: dict[int, list[tuple[float, Bar]]] = {}
    every = [bar for bars in rows for bar in bars]
    for rank in {bar.rank for bar in every}:
        computing = sorted((b for b in every if b.rank == rank and not b.communicates), key=lambda bar: bar.start)
        ends = [bar.end for bar in computing]
        for bar in (b for b in every if b.rank == rank and b.communicates):
            for other in computing[bisect_right(ends, bar.start) :]:
                if other.start >= bar.end:
                    break
                both = min(bar.end, other.end) - max(bar.start, other.start)
                found.setdefault(id(bar), []).append((both, other))
                found.setdefault(id(other), []).append((both, bar))
    return {id(bar): _in_words(bar, found[id(bar)]) for bar in every if id(bar) in found}


def _in_words(bar: Bar, others: Sequence[tuple[float, Bar]]) -> str:
    share = f"{sum(both for both, _ in others) / bar.seconds:.0%} hidden by " if bar.communicates else ""
    longest = sorted(others, key=lambda pair: -pair[0])
    named = [f"{other.label} for {both * 1e3:,.3f} ms" for both, other in longest[:NAMED]]
    return share + "; ".join([*named, *([f"and {len(others) - NAMED} more"] if len(others) > NAMED else [])])
