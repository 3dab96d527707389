"""`hf-helix simulate` and `hf-helix doctor` on a small model and clusters written here."""

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from support.paths import ROOT
from transformers import MixtralConfig

from hf_helix.cli import main
from hf_helix.cli.doctor import DoctorCommand
from hf_helix.cli.options import length, parse_count
from hf_helix.cli.simulate import SimulateCommand
from hf_helix.config import HelixConfig
from hf_helix.doctor.layouts import shared_samples
from hf_helix.planning.plan import search
from hf_helix.planning.rules import dhelix

TINY = ROOT / "recipes" / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two CPU processes over a slow link."""
    return cluster_file(tmp_path_factory.mktemp("cluster") / "small.yaml")


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """The doctor searches in this process: others would count once more what one of them has counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_helix.cli.doctor.usable_cores", lambda: 1)
        yield


@dataclass(frozen=True)
class Said:
    """What a command printed, and the file that it wrote."""

    text: str
    file: Path


def said_by_doctor(folder: Path, cluster: Path, tokens: str, *words: object) -> Said:
    """What the doctor says and writes for so many tokens a step."""
    file, output = folder / "helix.yaml", io.StringIO()
    with contextlib.redirect_stdout(output):
        main(words_of("doctor", cluster, "--batch_tokens", tokens, "--write", file, *words))
    return Said(output.getvalue(), file)


@pytest.fixture(scope="module")
def roomy(small: Path, one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What the doctor says where every layout fits, with a page beside its file where bokeh is installed."""
    folder = tmp_path_factory.mktemp("roomy")
    html = ["--html", folder / "page.html"] if importlib.util.find_spec("bokeh") else []
    return said_by_doctor(folder, small, "2k", "--why", *html)


def cluster_file(path: Path, memory_gb: float = 4, **keys: Any) -> Path:
    device = {
        "name": "CPU",
        "memory_gb": memory_gb,
        "peak_tflops": {"fp32": 0.05},
        "memory_gb_per_s": 5,
        "host_runs_ahead": False,
    }
    result = {"name": "two CPUs", "nodes": 1, "devices_per_node": 2, "backend": "gloo", "device": device}
    path.write_text(yaml.safe_dump({**result, "node": {"gb_per_s": 0.1, "latency_us": 100}, **keys}))
    return path


def words_of(command: str, cluster: object, *words: object) -> list[str]:
    options = ["--model", TINY, "--cluster", cluster, "--sequence_length", 128, "--dtype", "fp32"]
    return [command, *map(str, [*options, *words])]


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_adapters_need_gradients_and_states_for_themselves_alone(small: Path, capsys: Any):
    pytest.importorskip("peft")

    def memory(*adapters: object) -> dict[str, float]:
        main(words_of("simulate", small, "--microbatches", 2, *adapters))
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {words[0]: float(words[1]) for words in lines if words[-1:] == ["MB"] and len(words) == 3}

    whole, adapted = memory(), memory("--lora_r", 4)
    assert 0 < adapted["states"] < whole["states"] / 4
    assert 0 < adapted["gradients"] < whole["gradients"] / 4
    assert whole["weights"] <= adapted["weights"], "frozen weights are there"


def test_adapters_of_experts_and_routers_are_counted(small: Path, capsys: Any, tmp_path: Path):
    pytest.importorskip("peft")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 8, "vocab_size": 1000, "num_experts_per_tok": 2}
    MixtralConfig(**sizes, architectures=["MixtralForCausalLM"]).save_pretrained(tmp_path)
    main(words_of("simulate", small, "--microbatches", 2, "--lora_r", 16, "--model", tmp_path))
    gradients = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["gradients"])
    attention, router = 16 * (2 * (256 + 256) + 2 * (256 + 128)), 16 * (256 + 8)
    experts = 8 * (32 * (256 + 1024) + 16 * (512 + 256))  # the rank of the fused one is twice as high
    assert float(gradients.split()[1]) == pytest.approx(2 * 4 * (attention + router + experts) / 1e6, abs=0.06)


def test_adapters_that_cannot_be_made_are_refused_by_the_option(small: Path, capsys: Any):
    pytest.importorskip("peft")
    assert "--lora_r -1: give the rank" in refused(capsys, words_of("simulate", small, "--lora_r", -1))
    assert "no_such" in refused(capsys, words_of("simulate", small, "--lora_r", 2, "--target_modules", "no_such"))


def test_the_doctor_says_plain_data_parallelism_first_where_it_wins(roomy: Said):
    lines = roomy.text.splitlines()
    assert lines[0] == "LlamaForCausalLM on two CPUs, 2 devices, 2,000 tokens a step asked for"
    assert lines[2] == "Plain data parallelism is the fastest of these: no layer has to be cut."
    assert lines[4].split()[:2] == ["dp", "2"]
    assert "tp 2 " in roomy.text
    assert "cp_size=2 leaves less than 2,048 of 128 tokens to a rank:\n    cp 2" in roomy.text
    assert "of it exposed" not in roomy.text, "the best sends nothing in its window"
    loaded = load_config_from_file(str(roomy.file))
    assert (loaded.num_processes, loaded.use_cpu, loaded.mixed_precision) == (2, True, "no")
    assert loaded.distributed_type.value == "MULTI_GPU"
    assert HelixConfig.from_file(roomy.file) == HelixConfig(plan="sequential", shard_optimizer=True)
    assert "of the window, for weights that other ranks have stepped" in roomy.text
    assert "--config_file" in lines[-1]


def test_the_doctor_writes_a_page_of_all_rows(roomy: Said):
    pytest.importorskip("bokeh")
    rows = [line for line in roomy.text.splitlines() if line.count("%") > 4]
    text = roomy.file.with_name("page.html").read_text()
    assert len(rows) > 2
    assert all(row in text for row in rows)
    assert {row.partition("  ")[0] for row in rows} == set(re.findall(r'"([^"]+), [\d,]+ tokens/s"', text))


@pytest.mark.slow
def test_states_go_to_the_host_where_the_best_layout_recomputes(
    small: Path, one_process: None, capsys: Any, tmp_path: Path
):
    """On devices of which none holds the whole model."""
    main(words_of("simulate", small, "--gpus", 1, "--recompute", "full"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory"))
    number, unit = line.split()[1:3]
    scarce = cluster_file(tmp_path / "scarce.yaml", memory_gb=0.4 * float(number) * {"GB": 1, "MB": 1e-3}[unit])
    found = []
    for words in ((), ("--offload", "none")):
        said = said_by_doctor(tmp_path, scarce, "512", *words)
        assert "Data parallelism of hf_helix alone does not work: needs " in said.text
        assert (
            HelixConfig.from_file(said.file).ranks_per_batch == load_config_from_file(str(said.file)).num_processes == 2
        )
        rows = re.findall(r"^((?:\w\w \d(?: x )?)+) .*? ([\d,]+) +\d+% (.*)$", said.text, re.MULTILINE)
        found.append({name: ("offload optimizer" in how, int(rate.replace(",", ""))) for name, rate, how in rows})
    usual, without = found
    assert without.keys() <= usual.keys()
    assert not any(on_host for on_host, _ in without.values())
    assert any(on_host for on_host, _ in usual.values())
    assert all(rate >= without.get(name, (False, 0))[1] for name, (_, rate) in usual.items())


def test_another_row_than_the_best_is_shown_and_written(one_process: None, capsys: Any, tmp_path: Path):
    nodes = {"nodes": 2, "devices_per_node": 1, "network": {"gb_per_s": 0.1, "latency_us": 100}}
    two, file = cluster_file(tmp_path / "two.yaml", **nodes), tmp_path / "helix.yaml"
    words = words_of("doctor", two, "--batch_tokens", 512, "--top", 1)
    main([*words, "--layout", "PP2", "--write", str(file)])
    parts = capsys.readouterr().out.partition("As asked:\n")[2]
    assert parts.startswith("pp 2 on two CPUs")
    assert "network       between nodes: pp; inside a node: no axis" in parts
    assert "  pipeline " in parts, "a row below the shown ones is predicted as exactly"
    assert HelixConfig.from_file(file).pp_size == 2
    said = refused(capsys, [*words, "--layout", "tp 3"])
    assert "--layout 'tp 3': there is no such layout of these devices; use one of 'dp 2', " in said


@pytest.mark.slow
def test_a_capacity_of_experts_is_in_the_file(
    small: Path, one_process: None, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HELIX_CACHE", str(tmp_path / "cache"))
    model, file = ROOT / "recipes" / "models" / "tiny-phimoe", tmp_path / "helix.yaml"
    options = ["--model", model, "--batch_tokens", 512, "--expert_capacity_factor", 1.5, "--write", file]
    main(words_of("doctor", small, *options))
    said = capsys.readouterr().out
    assert "expert_capacity_factor 1.5" in said
    assert "--imbalance" not in said, "rows are known"
    assert HelixConfig.from_file(file).expert_capacity_factor == 1.5
    assert not (tmp_path / "cache" / "layouts").exists(), "a run is told nothing that was only supposed"


def test_several_questions_are_one_table(small: Path, capsys: Any):
    main(words_of("doctor", small, "--batch_tokens", "2k", "--gpus", 1, 2, "--sequence_length", 64, 128))
    head, *rows = capsys.readouterr().out.splitlines()[2:]
    assert head.split()[:3] == ["devices", "network", "sequence"]
    assert [row.split()[0] for row in rows] == ["1", "1", "2", "2"]
    assert [row.split()[3] for row in rows] == ["64", "128"] * 2


def test_a_layout_is_written_for_each_number_of_devices(one_process: None, tmp_path: Path):
    """A step and a micro-batch have the same samples on each, and the file is one for launchers."""
    nodes = {"nodes": 3, "devices_per_node": 2, "network": {"gb_per_s": 0.1, "latency_us": 100}}
    said = said_by_doctor(tmp_path, cluster_file(tmp_path / "three.yaml", **nodes), "8k", "--gpus", "1x2,3x2,2x2")
    rows = [line.split()[0] for line in said.text.splitlines() if line[:1].isdigit()]
    assert rows == ["6", "4", "2"]
    given = HelixConfig.from_file(said.file)
    assert list(given.layouts or ()) == [6, 4, 2]
    batch, steps = (int(number) for number in re.findall(r"(?:batch_size|accumulation_steps)=(\d+)", said.text))
    samples = batch * steps * 6 // given.for_world(6).ranks_per_batch
    assert said.text.splitlines()[0].endswith(f", {128 * samples:,} tokens in a step")
    assert abs(128 * samples - 8000) <= 800
    assert all(samples // batch % (world // each.ranks_per_batch) == 0 for world, each in given.by_world().items())
    launched = load_config_from_file(str(said.file))
    assert (launched.num_machines, launched.num_processes) == (3, 6)
    assert f"HELIX_CONFIG_FILE={said.file} torchrun --nnodes 1:3 --nproc_per_node 2 --max-restarts" in said.text
    assert said.file.read_text().count("torchrun") == 1


@pytest.mark.parametrize(
    ("wanted", "devices", "found"),
    [
        (1024, (32, 24, 16), 960),
        (1000, (8, 4), 1024),
        (7, (8, 4), 7),
        (1, (2, 1), 1),
        (50, (32, 24), 48),
        (62, (6, 4, 2), 60),
    ],
)
def test_samples_that_several_numbers_of_ranks_share(wanted: int, devices: tuple[int, ...], found: int):
    assert shared_samples(wanted, devices) == found


@pytest.mark.parametrize(
    ("network", "devices_per_link", "gbit"),
    [("8x400gbit", 1, 400), ("8xndr,5us", 1, 400), ("2xhdr", 4, 200), ("3x100gbe", 8, 300), ("x2", 1, 800)],
)
def test_networks_have_usual_names(network: str, devices_per_link: int, gbit: float):
    words = {"model": TINY, "cluster": "h100x8", "gpus": "16", "network": network}
    found = DoctorCommand(**words).scaled_cluster().network
    assert (found.devices, found.bandwidth * 8 / 1e9) == (devices_per_link, pytest.approx(gbit))


def test_a_model_that_no_layout_holds_is_refused_with_all_reasons(capsys: Any, tmp_path: Path):
    tiny = cluster_file(tmp_path / "tiny.yaml", memory_gb=0.0001)
    said = refused(capsys, words_of("doctor", tiny, "--batch_tokens", 256))
    assert "fits two CPUs; more devices (--gpus), shorter sequences" in said
    alone = "of a device that has 0.1 MB, for gradients alone, if all devices share these:\n    dp 2"
    assert alone in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_tokens", "much"], "--batch_tokens much: give a number of tokens, such as 512k or 4M"),
        (["--batch_tokens", "0"], "--batch_tokens 0: give a number"),
        (["--tokens", "many"], "--tokens many: give a number of tokens, such as 20B or 1.5T"),
        (["--sequence_length", "long"], "--sequence_length long: give a number of tokens, such as 4096 or 8k"),
        (["--top", "0"], "--top 0: give 1 or more"),
        (["--sequence_length", "0"], "--sequence_length 0: give 1 or more"),
        (
            ["--model", str(ROOT / "recipes" / "models" / "tiny-gpt2"), "--sequence_length", "4096"],
            "--sequence_length 4096: GPT2LMHeadModel has embeddings of 512 positions; give --sequence_length 512",
        ),
        (["--imbalance", "nan"], "--imbalance nan: give 1 or more"),
        (["--expert_capacity_factor", "0.5"], "--expert_capacity_factor 0.5: give 1 or more, such as 1.25"),
        (["--expert_capacity_factor", "2", "--imbalance", "1.5"], "--imbalance 1.5: with --expert_capacity_factor"),
        (["--expert_capacity_factor", "2"], "--expert_capacity_factor 2: LlamaForCausalLM has no experts; leave it"),
        (
            ["--network", "fast"],
            "--network fast: give a factor, such as x2, or a node's links, such as 10gbit",
        ),
        (["--network", "x2"], "--network x2: one node has no network"),
        (["--gpus", "1", "2", "--html", "page.html"], "--html is about one answer; give one --gpus, --network and"),
        (["--gpus", "2,1x2", "--write", "x.yaml"], "--gpus: [2, 2] are no different numbers of devices"),
        (
            ["--gpus", "1", "2", "--sequence_length", "64", "128", "--write", "x.yaml"],
            "--write is about one answer; give one --gpus, --network and --sequence_length",
        ),
        (["--gpus", "2x"], "--gpus 2x: give 1 or more devices, such as 16, or nodes x devices, such as 2x4"),
        (["--gpus", "3"], "--gpus 3: nodes have 2 devices each; give a multiple, such as 4"),
        (["--gpus", "4"], "--gpus 4: two CPUs has no `network`, which more than 2 devices need"),
        (["--dtype", "bf16"], "two CPUs has no device.peak_tflops for bf16; it has fp32"),
        (["--schedule", "zigzag"], "schedule='zigzag' is neither a schedule nor an existing file"),
        (["--model", "nowhere/at-all"], "nowhere/at-all: there is no such folder or file here"),
        (["--cluster", "h101x8"], "cluster='h101x8' is neither a file nor a cluster that hf_helix brings"),
        (["--modle", "x"], "hf-helix doctor: error: unknown option --modle (did you mean '--model'?)"),
    ],
)
def test_what_is_malformed_is_refused(words: list[str], message: str, small: Path, one_process: None, capsys: Any):
    given = words_of("doctor", small, *(["--batch_tokens", "2k"] if "--batch_tokens" not in words else []), *words)
    assert message in refused(capsys, given)


def test_counts():
    numbers = {"512": 512, "512k": 512_000, "4M": 4_000_000, "0.5M": 500_000, "1e6": 10**6, "1.5T": 1_500_000_000_000}
    assert {text: parse_count(text, "--tokens", "4M") for text in numbers} == numbers
    assert (length("8k"), length("4096")) == (8000, 4096)


def test_simulate_shows_all_plans(small: Path, capsys: Any, monkeypatch: Any):
    monkeypatch.setattr(search, "EFFORT", 2000)  # plans need not be good
    monkeypatch.setattr(dhelix, "MAX_STATES", 30)
    options = ["--tp_size", 2, "--microbatches", 2, "--plan", "all"]
    main(words_of("simulate", small, *options))
    said = capsys.readouterr().out
    assert said.startswith("tp 2 on two CPUs: 2 x 1, 128 tokens a sequence\n")
    rows = {line.split()[0]: line for line in said.splitlines() if line.endswith("x")}
    assert rows.keys() == {"sequential", "round_robin", "dhelix", "greedy", "search"}
    assert rows["sequential"].endswith("1.00x")
    assert float(rows["greedy"].split()[-1].removesuffix("x")) > 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp_size", "4"], "two CPUs has 2 devices, which tp_size x pp_size x cp_size = 4 does not divide"),
        (["--ep_size", "4"], "--ep_size 4 does not divide the 2 data-parallel ranks"),
        (["--microbatches", "0"], "--microbatches 0: give 1 or more"),
        (["--schedule", "zigzag"], "schedule='zigzag' is neither a schedule nor an existing file"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(words: list[str], message: str, small: Path, capsys: Any):
    assert message in refused(capsys, words_of("simulate", small, *words))


def test_more_devices_and_a_faster_network(capsys: Any, tmp_path: Path):
    file = cluster_file(tmp_path / "two.yaml", nodes=2, network={"gb_per_s": 0.01})
    main(words_of("simulate", file, "--gpus", 8, "--tp_size", 2, "--network", "x2"))
    assert capsys.readouterr().out.startswith("tp 2 x dp 4 on 4 x 2 CPU, network x2: 16 x 1")
    main(words_of("simulate", file, "--gpus", 8, "--tp-size", 2, "--network", "10gbit,50us"))  # hyphens do, too
    assert capsys.readouterr().out.startswith("tp 2 x dp 4 on 4 x 2 CPU, network 10 Gbit/s, 50 us: 16 x 1")
    link = SimulateCommand(model="", cluster=str(file), network="10gbit,50us").scaled_cluster().network
    assert (link.bandwidth, link.latency, link.devices) == (1.25e9, 50e-6, 2)
    shape = SimulateCommand(model="", cluster="a6000x8", gpus="2x4", network="25gbit").scaled_cluster()
    assert (shape.nodes, shape.devices_per_node, shape.network.devices, shape.network.bandwidth) == (2, 4, 4, 3.125e9)
    kept = SimulateCommand(model="", cluster="a6000x8", gpus="2x4").scaled_cluster()
    assert kept.network.devices == 4, "the devices of a node share its link"


def test_spread_weights_are_simulated(small: Path, capsys: Any, tmp_path: Path):
    page = tmp_path / "page.html"
    html = ["--html", page] if importlib.util.find_spec("bokeh") else []
    main(words_of("simulate", small, "--microbatches", 2, "--shard_parameters", *html))
    said = capsys.readouterr().out
    if html:
        assert said.splitlines()[-1] == f"a page of it: {page}"
        assert "dp 2, plan " in page.read_text()
        assert re.search(r"F\d\.\S+weights", page.read_text())
    assert said.startswith("dp 2 on two CPUs: 2 x 1, shard_parameters, 128 tokens a sequence\n")
    assert "all-gathers of weights" in said
    main(words_of("simulate", small, "--microbatches", 2, "--shard_parameters", "--reduce_gradients", "microbatch"))
    assert "shard_parameters, gradients reduced in every micro-batch," in capsys.readouterr().out
    both = ["--shard_parameters", "--shard_optimizer"]
    assert "use shard_optimizer=False" in refused(capsys, words_of("simulate", small, *both))
