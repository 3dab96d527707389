"""`hf-helix`: plan and show work from files alone; bad input takes one message."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.profiles import MODEL, broken, tiny_profile

from hf_helix.cli import main
from hf_helix.cli import plan as plan_command
from hf_helix.cli import profile as profile_command
from hf_helix.config import RULES
from hf_helix.planning.choice import auto
from hf_helix.planning.plan import search
from hf_helix.planning.plan.predict import predict
from hf_helix.planning.rules import dhelix
from hf_helix.planning.rules.registry import load_plan, make_plan
from hf_helix.planning.schedule.named import build_schedule
from hf_helix.planning.timing.profile_file import save_profile
from hf_helix.planning.timing.recompute import recompute_profile

MESH = {"tp_size": 2, "pp_size": 1}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of a few steps."""
    monkeypatch.setattr(search, "EFFORT", 20_000)
    monkeypatch.setattr(dhelix, "MAX_STATES", 100)
    monkeypatch.setattr(auto, "TRIALS", 200)


@pytest.fixture
def two_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command predicts these only, for what is not about the others: they take seconds."""
    monkeypatch.setattr(plan_command, "RULES", ("sequential", "greedy"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_profile(tiny_profile(), tmp_path / "profile.json")
    return tmp_path / "profile.json"


def plan_file(rule: str, path: Path) -> Path:
    """A plan for the profile by hand."""
    make_plan(rule, tiny_profile(), model=MODEL, mesh=MESH).save(path)
    return path


def run(*words: object) -> None:
    main([str(word) for word in words])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the command says when it ends with status 2; it says it once and prints nothing else."""
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """As `refused`, by the command itself, in one line that names it."""
    text = refused(capsys, *words)
    assert text.startswith(f"hf-helix {words[0]}: ")
    assert text.count("\n") == 1, text
    return text


# plan


def test_the_table_is_what_the_cost_function_says(file: Path, tmp_path: Path, capsys: Any) -> None:
    run("plan", file, "--rule", "dhelix", "--microbatches", "3", "--output", tmp_path / "plan.json")
    head, titles, *rows = capsys.readouterr().out.splitlines()
    rows, lasts = rows[: len(RULES)], rows[len(RULES) :]
    assert head.startswith("a window of 3 micro-batches; no plan can beat ")
    limit = float(head.split()[-2])
    assert titles.split() == ["plan", "predicted", "speed-up", "of", "bound"]
    assert [row.split()[0] for row in rows] == list(RULES)
    figures = {row.split()[0]: (float(row.split()[1]), float(row.split()[3].rstrip("x"))) for row in rows}
    profile = tiny_profile()
    plan = load_plan(tmp_path / "plan.json", profile.layout.graphs, model=MODEL, mesh=MESH)
    seconds = predict(plan, profile, build_schedule("folded_1f1b", 1, 3), timeline=True).seconds
    assert figures["dhelix"][0] == pytest.approx(seconds * 1e3, abs=0.05)
    assert figures["sequential"][1] == 1.0
    for milliseconds, speedup in figures.values():
        assert milliseconds >= limit - 0.1
        assert speedup == pytest.approx(figures["sequential"][0] / milliseconds, abs=0.01)
    assert figures["search"][0] < figures["sequential"][0]
    assert lasts[0] == f"dhelix: {tmp_path / 'plan.json'}"
    fastest = min(figures, key=lambda rule: figures[rule][0])
    assert lasts[1:] == [] or lasts[1].startswith(f"{fastest} is predicted to be ")


@pytest.mark.parametrize("rules", [("sequential", "greedy"), ("greedy", "sequential")])
def test_the_fastest_is_saved_where_nothing_else_is_asked_for(
    rules: tuple[str, ...], file: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_command, "RULES", rules)
    run("plan", file)
    assert json.loads((tmp_path / "plan.json").read_text())["rule"] == "greedy"
    assert "predicted to be" not in capsys.readouterr().out
    run("plan", file, "--rule", "sequential")
    assert json.loads((tmp_path / "plan.json").read_text())["rule"] == "sequential"
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("greedy is predicted to be ")
    assert said.endswith("% faster: --rule greedy")


def test_plans_as_if_layers_were_recomputed(file: Path, tmp_path: Path, two_rules: None, capsys: Any) -> None:
    """Running again takes as long as forward: the predictions are those of a profile measured so."""
    output = tmp_path / "plan.json"
    run("plan", file, "--rule", "greedy", "--output", output, "--recompute", "full")
    profile = recompute_profile(tiny_profile(), "full")
    assert load_plan(output, profile.layout.graphs, model=MODEL, mesh=MESH).rule == "greedy"
    repeats = [name for name in profile.times if name[1].endswith(".again")]
    assert repeats
    assert all(profile.times[unit, entry] == profile.times[unit, f"F.{entry[2:-6]}"] for unit, entry in repeats)
    run("show", output, "--profile", file, "--recompute", "full")
    assert "R forward again, in backward" in capsys.readouterr().out
    assert "is for graphs" in refused(capsys, "show", output, "--profile", file)
    save_profile(profile, file)
    assert "leave --recompute out" in said(capsys, "plan", file, "--recompute", "full")


# show


def test_a_plan_as_text(file: Path, tmp_path: Path, capsys: Any) -> None:
    plan_file("greedy", tmp_path / "plan.json")
    run("show", tmp_path / "plan.json", "--profile", file, "--microbatches", "2", "--width", "90")
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("greedy: 2 micro-batches, predicted ")
    assert [row.split()[0] for row in rows[:2]] == ["compute", "intra_node"]
    assert all(len(row) <= 90 for row in rows)


def test_pages(file: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("bokeh")
    plan_file("round_robin", tmp_path / "plan.json")
    page, plan = tmp_path / "page.html", ("show", tmp_path / "plan.json", "--profile", file)
    for words, heading in (
        ((*plan, "--microbatches", 1), "The window"),
        ((*plan, "--compare", "sequential"), "The window"),
        (("show", "--schedule", "dualpipe_v", "--pp", 2), "The pipeline"),
    ):
        run(*words, "--html", page)
        assert capsys.readouterr().out == f"{page}\n"
        assert f"<h2>{heading}</h2>" in page.read_text()
    assert "of another model" in said(capsys, *plan, "--html", page, "--model", ROOT / "recipes/models/tiny-llama")


def test_a_profile_as_text(file: Path, capsys: Any) -> None:
    run("show", file)
    text = capsys.readouterr().out
    assert "device: by hand" in text
    assert "overlap efficiency" in text
    # (3 + 2 - 3.4) / 2
    assert "0.80" in text
    assert "intra-node communication" in text


# show --schedule


def test_a_schedule_as_text(capsys: Any) -> None:
    run("show", "--schedule", "folded_1f1b", "--pp", 4, "--microbatches", 12, "--width", 90)
    title, _, *rows, _, head, first, _, _, last = capsys.readouterr().out.splitlines()
    # 1F1B over 16 units that go down and up; a fused slot takes as long as its two.
    assert title == "folded_1f1b: 4 ranks, 12 micro-batches, time 90"
    assert [row.split()[1] for row in rows[:4]] == ["0", "1", "2", "3"]
    assert all(len(row) <= 90 for row in rows[:4])
    assert head.split() == ["bubble", "fused", "live", "activations", "in", "stage-shares"]
    assert first.split() == ["rank", "0", "20.0%", "16", "9", "4.50"]
    assert last.split()[:2] == ["rank", "3"]


def test_times_of_the_command_line_are_used(capsys: Any) -> None:
    def time(*words: object) -> float:
        run("show", "--schedule", "1f1b", "--pp", 2, "--microbatches", 3, *words)
        return float(capsys.readouterr().out.splitlines()[0].rpartition(" ")[2])

    # 1F1B on two ranks takes the time of 3 + 1 micro-batches, of two layers each unless told otherwise.
    assert time() == 4 * 2 * 3
    assert time("--forward", 2, "--input", 3, "--weight", 0.5) == 4 * 2 * 5.5
    assert time("--layers", 6) == 4 * 3 * 3
    assert time("--transfer", 0.25) > time()
    assert time("--gain", 1.4) == time()


def test_schedules_are_compared(capsys: Any) -> None:
    run("show", "--schedule", "all", "--pp", 2, "--microbatches", 4, "--gain", 1.4)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["schedule", "time", "bubble", "fused"]
    assert [row.split()[0] for row in rows] == ["folded_1f1b", "dualpipe_v", "1f1b", "auto"]
    times = {row.split()[0]: float(row[24:34].replace(",", "")) for row in rows}
    assert min(times, key=lambda name: times[name]) == "auto"
    run("show", "--schedule", "auto", "--pp", 2, "--microbatches", 4, "--gain", 1.4)
    title = capsys.readouterr().out.splitlines()[0]
    assert title.startswith("auto (")
    assert float(title.rpartition(" ")[2]) == pytest.approx(times["auto"], abs=0.01)


def test_an_action_file_is_drawn(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text("0F0,0F1,0B0,,0B1\n1F0,1B0,1F1,1B1\n")
    for words, title in (
        ((), "2 ranks, 2 micro-batches, time "),
        (("--microbatches", 1), "2 ranks, 1 micro-batches, time 12"),
    ):
        run("show", "--schedule", path, "--pp", 2, *words)
        assert capsys.readouterr().out.startswith(f"{path}: {title}")
    assert "take at most 2 micro-batches" in said(capsys, "show", "--schedule", path, "--pp", 2, "--microbatches", 3)
    text = refused(capsys, "show", "--schedule", path, "--pp", 3)
    assert text.startswith(f"hf-helix show: schedule file {path}: ")
    assert "pp_size=3 needs 3" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "such as --schedule 1f1b; give one of them"),
        (("P", "--schedule", "folded_1f1b"), "give one of them"),
        (("--schedule", "magic"), "'magic' is neither the name of a schedule nor an existing file"),
        (("--schedule", "folded_1f1b", "--pp", 0), "--pp 0: give 1 or more"),
        (("--schedule", "folded_1f1b", "--microbatches", 0), "--microbatches 0: give 1 or more"),
        (("--schedule", "folded_1f1b", "--layers", 7), "7 layers and pp_size=4 needs at least 8"),
        (("--schedule", "folded_1f1b", "--gain", 0), "--gain 0: give more than 0"),
        (("--schedule", "all", "--html", "x.html"), "name one schedule"),
        (("--schedule", "1f1b", "--output", "x.svg"), "--output would mean nothing where a schedule is drawn"),
        (("--schedule", "1f1b", "--compare", "greedy"), "--compare would mean nothing where a schedule is drawn"),
        (("P", "--pp", 2, "--gain", 2), "--pp and --gain would mean nothing where a file is drawn"),
        (("P", "--microbatches", 3), "--microbatches would mean nothing where a profile is drawn"),
    ],
    ids=str,
)
def test_schedules_that_cannot_be_shown(words: tuple[object, ...], message: str, file: Path, capsys: Any) -> None:
    assert message in said(capsys, "show", *(file if word == "P" else word for word in words))


# Bad input


def test_what_is_no_profile_is_refused(file: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "plan.json"
    for command in ("plan", "show"):
        assert "absent.json" in said(capsys, command, tmp_path / "absent.json")
        assert str(tmp_path) in said(capsys, command, tmp_path)
        broken(file, lambda data: data["operators"]["layer"].pop("F.mlp.up"))
        assert "profile.json is damaged" in (text := said(capsys, command, file))
        assert "hf-helix profile" in text
        save_profile(tiny_profile(), file)
    for data, shown, planned in (
        (b"{", f"{file} is not JSON", str(file)),
        (b"\xff\xfe\x00", f"{file} is not JSON", str(file)),
        (b'{"format": "other/1"}', "is neither a plan nor a profile", "has format"),
    ):
        file.write_bytes(data)
        assert shown in said(capsys, "show", file)
        assert planned in said(capsys, "plan", file, "--output", output)
        assert not output.exists()


def test_a_plan_needs_a_profile_to_be_drawn(file: Path, tmp_path: Path, capsys: Any) -> None:
    plan = plan_file("greedy", tmp_path / "plan.json")
    assert "add --profile profile.json" in said(capsys, "show", plan)
    assert "absent.json" in said(capsys, "show", plan, "--profile", tmp_path / "absent.json")
    assert "has format" in said(capsys, "show", plan, "--profile", plan)


def test_a_plan_for_something_else_or_damaged_is_refused(file: Path, tmp_path: Path, capsys: Any) -> None:
    plan, other = plan_file("sequential", tmp_path / "plan.json"), tmp_path / "other.json"
    save_profile(tiny_profile(), other)
    broken(other, lambda data: data["about"].update(mesh="tp=4"))
    assert "is for mesh" in refused(capsys, "show", plan, "--profile", other)
    broken(plan, lambda data: data["blocks"]["F.layer"].reverse())
    assert str(plan) in refused(capsys, "show", plan, "--profile", file)
    plan_file("greedy", plan)
    broken(plan, lambda data: data["priorities"]["operators"].pop("head"))
    assert str(plan) in refused(capsys, "show", plan, "--profile", file)


@pytest.mark.parametrize(("key", "value"), [("model", None), ("mesh", ""), ("mesh", "x=y"), ("mesh", "tp=two")])
def test_a_profile_that_does_not_say_what_it_is_for(key: str, value: str | None, file: Path, capsys: Any) -> None:
    broken(file, lambda data: data["about"].pop(key) if value is None else data["about"].update({key: value}))
    assert "does not say what it is for" in said(capsys, "plan", file)


def test_output_and_micro_batches_that_cannot_be(file: Path, tmp_path: Path, two_rules: None, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        run("plan", file, "--rule", "greedy", "--output", tmp_path / "absent" / "plan.json")
    assert caught.value.code == 2
    assert "absent" in capsys.readouterr().err
    plan = plan_file("greedy", tmp_path / "plan.json")
    words = ("show", plan, "--profile", file)
    assert "end with one of .svg, .png" in said(
        capsys, *words, "--compare", "sequential", "--output", tmp_path / "x.bmp"
    )
    assert "0" in said(capsys, "plan", file, "--microbatches", 0)
    assert "-1" in said(capsys, *words, "--microbatches", -1)


@pytest.mark.parametrize(
    "words",
    [("planning",), ("plan",), ("plan", "P", "--rule", "magic"), ("show", "P", "--width", "wide"), ("profile",)],
    ids=str,
)
def test_wrong_words_are_refused(words: tuple[str, ...], file: Path, capsys: Any) -> None:
    text = refused(capsys, *(str(file) if word == "P" else word for word in words))
    assert "usage: hf-helix" in text


def test_an_unknown_schedule_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(profile_command, "start", lambda *_, **__: pytest.fail("a process was started"))
    text = said(capsys, "profile", "--model", tmp_path, "--tp_size", 1, "--pp_size", 2, "--schedule", "1f2b")
    assert "schedule='1f2b' is neither the name of a schedule nor an existing file" in text
