"""The picture of two layers: the same work in every strip, on one axis, and the gain that is written beside it."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.profiles import MODEL, tiny_profile

from hf_helix.cli import main
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile_file import save_profile
from hf_helix.report.strands import Strip, draw_strips, strips_of_plans, text_strips

MESH = {"tp_size": 2, "pp_size": 1}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def strips() -> list[Strip]:
    profile = tiny_profile()
    return strips_of_plans(
        profile, [make_plan(rule, profile, model=MODEL, mesh=MESH) for rule in ("sequential", "greedy")]
    )


def test_every_strip_does_the_same_work(strips: list[Strip]) -> None:
    one, two = ({bar.label for bar in strip.bars} for strip in strips)
    assert one == two
    assert {label.partition(".layer.")[2][0] for label in one} == {"0", "1"}
    assert {label[:2] for label in one} == {"F1", "B0"}
    assert strips[0].title == "one strand (sequential)"
    assert strips[0].seconds > strips[1].seconds
    assert strips[0].busy < strips[1].busy


def test_text_is_to_scale_and_says_the_gain(strips: list[Strip]) -> None:
    text = text_strips(strips, width=90)
    rows = re.findall(r"^    (computation|communication) *(\S+)$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["computation", "communication"] * 2
    assert all(len(line) <= 90 for line in text.splitlines())
    lengths = [len(letters) for _, letters in rows]
    assert lengths[2] / lengths[0] == pytest.approx(strips[1].seconds / strips[0].seconds, abs=0.02)
    assert rows[0][1].count("·") > rows[2][1].count("·")
    assert f"{strips[0].seconds / strips[1].seconds:.2f}x as fast" in text


def test_the_picture_holds_every_operator_of_both_and_the_command_draws_it(
    strips: list[Strip], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_strips(strips, tmp_path / "plan.svg", "by hand")
    ids = {element.get("id", "") for element in ET.fromstring((tmp_path / "plan.svg").read_text()).iter(f"{SVG}g")}
    for place, strip in enumerate(strips):
        assert {f"strip{place}:{bar.label}" for bar in strip.bars} <= ids
    profile, paths = tiny_profile(), [str(tmp_path / name) for name in ("plan.json", "profile.json", "plan.png")]
    save_profile(profile, paths[1])
    make_plan("greedy", profile, model=MODEL, mesh=MESH).save(paths[0])
    words = ["show", paths[0], "--profile", paths[1], "--compare", "sequential"]
    main([*words, "--width", "90"])
    assert text_strips(strips, 90) in capsys.readouterr().out
    main([*words, "--output", paths[2]])
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
