"""Pages hold every operator to scale with those beside it, ask for nothing outside, and work in a browser."""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.profiles import tiny_profile
from support.simulated import case_of, cluster_with, on_meta
from support.windows import bar, window

from hf_helix.cli import main
from hf_helix.doctor.page import layouts_part, memory_of_run, step_parts
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import profile_of, simulate_step
from hf_helix.planning.choice.scheduler import simulate_layers
from hf_helix.planning.plan.predict import Prediction
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.profile_file import save_profile
from hf_helix.report.page import colours_of_parts, pipeline_part, plan_parts, stacked, window_part, write_page
from hf_helix.report.timeline import bars_of_timeline
from hf_helix.tuning.cache import model_digest

pytest.importorskip("bokeh")


def columns(figure: Any) -> dict[str, list[Any]]:
    """What the first rectangles of a figure hold."""
    return {name: list(values) for name, values in figure.renderers[0].data_source.data.items()}


def test_every_operator_is_a_rectangle_to_scale() -> None:
    bars = bars_of_timeline(*window())
    (figure,) = window_part({"by hand": bars}).figures
    drawn = columns(figure)
    shown = dict(zip(drawn["operator"], zip(drawn["left"], drawn["right"], strict=True), strict=True))
    assert shown == {b.label: pytest.approx((b.start * 1e3, b.end * 1e3)) for b in bars}
    assert figure.title.text.startswith("by hand: ")


def test_an_operator_names_those_beside_it() -> None:
    one = [bar(0, 4), bar(5, 9, operator="down"), bar(2, 6, "intra_node", operator="gather"), bar(9, 10, "intra_node")]
    drawn = columns(window_part({"": one}).figures[0])
    beside = dict(zip(drawn["operator"], drawn["beside"], strict=True))
    up, down, gather = ("F0.layers.0." + name for name in ("up", "down", "gather"))
    assert beside[gather] == f"75% hidden by {up} for 2,000.000 ms; {down} for 1,000.000 ms"
    assert beside[down] == f"{gather} for 1,000.000 ms"
    assert drawn["beside"][-1] == "nothing"


def test_every_action_of_a_schedule_is_there_once_and_fused_ones_share_their_slot() -> None:
    _, simulated = simulate_layers("folded_1f1b", 2, 4)
    (figure,) = pipeline_part(simulated, "").figures
    drawn = columns(figure)
    actions = [action for slots in simulated.schedule for slot in slots for action in slot.actions]
    assert sorted(drawn["operator"]) == sorted(map(str, actions))
    height = {round(float(bottom - top), 2) for top, bottom in zip(drawn["top"], drawn["bottom"], strict=True)}
    assert height == {0.84, 0.42}


def test_the_memory_of_a_step_rises_to_what_the_doctor_says() -> None:
    cluster = cluster_with(nodes=1, devices_per_node=4, node={"gb_per_s": 2, "latency_us": 5})
    simulated, case = SimulatedModel(on_meta(num_hidden_layers=8), cluster), case_of(tp=2, pp=2, microbatches=6)
    step = simulate_step(simulated.amounts(case), case, cluster)
    timeline, pipeline = step_parts(simulated.amounts(case), case, cluster)
    (memory,) = [figure for figure in timeline.figures if figure.title.text.startswith("memory")]
    assert 1e9 * max(memory.renderers[-1].data_source.data["total"]) == pytest.approx(step.memory.total)
    assert "bubble" in pipeline.figures[0].title.text
    assert columns(stacked({"a": {"x": 1.0, "y": 2.0}}, "", ""))["right"] == [1.0, 3.0]
    # Every part has a colour of its own, the same in every figure; what nothing hides is hatched.
    names = ["computation", "exposed intra_node", "exposed inter_node", "bubble", "rest", "optimizer", "other"]
    drawn = [columns(stacked({"row": dict.fromkeys(each, 1.0)}, "", "")) for each in (names, names[2:4])]
    assert len(set(drawn[0]["colour"])) == len(names)
    assert list(drawn[1]["colour"]) == list(drawn[0]["colour"])[2:4]
    assert [hatch != "blank" for hatch in drawn[0]["hatch"]] == [name.startswith("exposed") for name in names]
    for kind in (step.memory.parts(), {f"exposed {kind.value}": 1.0 for kind in step.loads if kind.communicates}):
        colours = colours_of_parts([*kind])
        assert len({*colours.values()}) == len(kind)
    seconds, held = layouts_part({"mine": step}, cluster, "").figures
    assert columns(seconds)["right"][-1] == pytest.approx(1e6 * step.seconds / case.tokens, rel=0.02)
    assert columns(held)["right"][-1] == pytest.approx(step.memory.total / 1e9)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"dp": 2, "shard_optimizer": True}, "stepped by 2"),
        ({"offload": "optimizer"}, "stepped by 1, optimizer on the host"),
        ({"offload": "parameters"}, "spread over 1, parameters on the host"),
        ({"pp": 2, "spread_vocabulary": True}, ""),
    ],
    ids=str,
)
def test_the_memory_of_a_run_is_that_of_its_case(options: dict[str, Any], shared: str) -> None:
    """From what its profile says alone, such as that the host has weights and states."""
    cluster, model = cluster_with(nodes=1, devices_per_node=2), on_meta(num_hidden_layers=4)
    case = case_of(microbatches=4, plan="sequential", **options)
    amounts = SimulatedModel(model, cluster).amounts(case)
    step, profile = simulate_step(amounts, case, cluster), profile_of(amounts, case, cluster, whole=True)
    assert step.drawn is not None
    about = {"model": f"LlamaForCausalLM {model_digest(model)} bfloat16", "shapes": "1 x 64", "backend": "nccl"}
    profile = replace(profile, about={**about, "weights": shared})
    programs, timeline = step.drawn
    mesh = {"pp_size": case.sizes.pp}
    drawn = memory_of_run(model.config, profile, mesh, Prediction(0.0, 0.0, drawn=timeline, instructions=programs))
    most = max(sum(parts) for parts in zip(*drawn.parts.values(), strict=True))
    assert most == pytest.approx(step.memory.total)
    assert (max(drawn.parts["states"]) == 0) is bool(case.config.offload)


class Sources(HTMLParser):
    """What a page would load."""

    found: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan, by the command."""
    folder, known = tmp_path_factory.mktemp("page"), tiny_profile()
    save_profile(known, folder / "profile.json")
    make_plan("greedy", known, model="LlamaForCausalLM", mesh={"tp_size": 2, "pp_size": 1}).save(folder / "plan.json")
    (folder / "tuning.txt").write_text("measured & kept\n")
    plan, times, result = (str(folder / name) for name in ("plan.json", "profile.json", "page.html"))
    main(["show", plan, "--profile", times, "--html", result])
    return folder / "page.html"


def test_a_page_is_one_file(page: Path) -> None:
    text, sources = page.read_text(), Sources()
    sources.found = []
    sources.feed(text)
    assert sources.found == []
    assert "measured &amp; kept" in text
    assert len(text) < 3e6


@pytest.fixture
def shown(page: Path) -> Iterator[tuple[Any, list[str], list[str]]]:
    """The page in a headless browser, the errors of its scripts, and the addresses that it asks for."""
    api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no browser: apt-get install chromium")
    errors: list[str] = []
    asked: list[str] = []
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        result = browser.new_page(viewport={"width": 1220, "height": 900})
        result.on("pageerror", lambda error: errors.append(str(error)))
        result.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        result.on("request", lambda request: asked.append(request.url))
        result.goto(page.as_uri())
        result.wait_for_selector(".bk-Figure")
        yield result, errors, asked
        browser.close()


def test_a_page_in_a_browser(page: Path, shown: tuple[Any, list[str], list[str]]) -> None:
    opened, errors, asked = shown

    def under_mouse(across: float, down: int) -> list[str]:
        """The words of the tip at a part of the width of the figure, and so many pixels below its top."""
        box = opened.locator(".bk-Figure").first.bounding_box()
        opened.mouse.move(box["x"] + across * box["width"], box["y"] + down)
        opened.wait_for_timeout(100)
        tips = opened.locator(".bk-Tooltip .bk-tooltip-content:visible")
        return tips.first.inner_text().split() if tips.count() else []

    said = [words for step in range(20) for down in (50, 80) if (words := under_mouse(0.15 + 0.02 * step, down))]
    assert {words[1] for words in said} <= set(re.findall(r'"([FB]\d+\.[^"]+)"', page.read_text()))
    assert any("hidden" in words for words in said), said
    assert opened.locator("pre").first.inner_text().startswith("measured & kept")
    assert opened.locator(".bk-Figure").count() == 1
    assert errors == []
    assert [address for address in asked if not address.startswith(("file:", "data:", "blob:"))] == []


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must end with \.html, such as page\.html"):
        write_page(tmp_path / "page.svg", "", [])
    with pytest.raises(ValueError, match="nothing to draw"):
        window_part({"": []})
    known = tiny_profile()
    plan = make_plan("greedy", known, model="LlamaForCausalLM", mesh={"tp_size": 2})
    monkeypatch.setitem(sys.modules, "bokeh.plotting", None)
    with pytest.raises(ImportError, match=r"of the extra `html`: pip install bokeh$"):
        plan_parts(plan, known, build_schedule("folded_1f1b", 1, 2))
