"""Recipes: model configurations have the shapes they are named for, layouts fit them, and pages say what there is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from huggingface_hub import ModelCard
from support.cluster import free_port
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_helix import HelixConfig
from hf_helix.models.registry import supported_models

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "accelerate_configs"
MODELS = ROOT / "recipes" / "models"
README = (ROOT / "recipes" / "README.md").read_text()

FILES = sorted(LAUNCH.rglob("*.yaml"))
PAPER_FILES = sorted((LAUNCH / "paper").glob("*.yaml"))
AXES = ("dp", "tp", "cp", "pp", "ep")
HOST = 8  # GPUs

# Of the paper's models: billions of parameters in the decoder layers, with grouped-query attention.
PAPER_LAYERS = {
    "llama-8b": 7.0,
    "llama-25b": 24.0,
    "llama-39b": 38.3,
    "llama-66b": 65.0,
    "gpt-6.7b": 6.4,
    "gpt-18b": 18.1,
    "gpt-30b": 29.0,
    "phi-16b": 15.6,
    "phi-31b": 31.2,
    "phi-42b": 41.6,
}
ALL_MODELS = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


# Models


class Count(NamedTuple):
    """Parameters."""

    layers: int
    experts: int  # of the layers
    rest: int

    @property
    def total(self) -> int:
        return self.layers + self.rest


def llama(c: Any) -> Count:
    hidden, kv = c.hidden_size, c.num_key_value_heads * c.hidden_size // c.num_attention_heads
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * c.intermediate_size + 2 * hidden
    return Count(c.num_hidden_layers * layer, 0, 2 * c.vocab_size * hidden + hidden)


def gpt2(c: Any) -> Count:
    """Biases everywhere; the embedding is the head, too; learned positions."""
    hidden = c.hidden_size
    layer = 12 * hidden * hidden + 13 * hidden
    return Count(c.num_hidden_layers * layer, 0, (c.vocab_size + c.n_positions) * hidden + 2 * hidden)


def phimoe(c: Any) -> Count:
    """LayerNorm with biases, a router, and experts with a gate."""
    hidden, kv = c.hidden_size, c.num_key_value_heads * c.hidden_size // c.num_attention_heads
    experts = c.num_local_experts * 3 * hidden * c.intermediate_size
    layer = 2 * hidden * hidden + 2 * hidden * kv + hidden * c.num_local_experts + experts + 4 * hidden
    layers = c.num_hidden_layers
    return Count(layers * layer, layers * experts, 2 * c.vocab_size * hidden + 2 * hidden)


FORMULAS: dict[str, Callable[[Any], Count]] = {"llama": llama, "gpt2": gpt2, "phimoe": phimoe}


def config_of(model: str) -> Any:
    return AutoConfig.from_pretrained(MODELS / model)


@cache
def count(model: str) -> Count:
    """Of a model that is built, on no device."""
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config_of(model))
    sizes = {name: weight.numel() for name, weight in built.named_parameters()}
    in_layers = {name: size for name, size in sizes.items() if re.search(r"\.(layers|h)\.\d+\.", name)}
    experts = sum(size for name, size in in_layers.items() if ".experts." in name)
    layers = sum(in_layers.values())
    return Count(layers, experts, sum(sizes.values()) - layers)


@pytest.mark.parametrize("model", ALL_MODELS)
def test_a_configuration_makes_the_model_it_names(model: str):
    config = config_of(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert [type(built).__name__] == config.architectures
    assert config.architectures[0] in supported_models()
    assert f"(models/{model}/config.json)" in README


@pytest.mark.parametrize("model", PAPER_LAYERS)
def test_the_papers_models_have_its_numbers_of_parameters(model: str):
    found = count(model)
    assert found == FORMULAS[config_of(model).model_type](config_of(model))
    assert round(found.layers / 1e9, 1) == PAPER_LAYERS[model]
    # The name is the number of the layers, of the whole, or between them; to 1 %.
    named = float(model.rpartition("-")[2].removesuffix("b")) * 1e9
    assert 0.99 * found.layers <= named <= 1.01 * found.total
    assert f"| {found.total / 1e9:.1f} |" in row_of(f"(models/{model}/config.json)")


def test_every_family_has_a_small_model():
    small = {config_of(model).architectures[0] for model in ALL_MODELS if model.startswith("tiny-")}
    assert small == set(supported_models())
    assert all(count(model).total < 1e6 for model in ALL_MODELS if model.startswith("tiny-"))


# Layouts


class Recipe(NamedTuple):
    """What a file under accelerate_configs is for, by the command in its header."""

    launch: dict[str, Any]
    sizes: dict[str, int]
    flags: dict[str, str]

    @property
    def model(self) -> str:
        return Path(self.flags.get("config_name", "llama-5m")).name


def recipe_of(path: Path) -> Recipe:
    launch = yaml.safe_load(path.read_text())
    helix = launch["parallelism_config"]["helix"]
    sizes = {name: helix.get(f"{name}_size", 1) for name in AXES[1:]}
    shared = sizes["tp"] * sizes["cp"] * sizes["pp"]
    assert launch["num_processes"] % shared == 0
    (command,) = re.findall(r"^#   (accelerate launch .*)$", path.read_text(), re.MULTILINE)
    assert f"--config_file {path.relative_to(ROOT)} " in command or path.stem == "helix"
    flags = dict(re.findall(r"--(\w+) (\S+)", command))
    return Recipe(launch, {"dp": launch["num_processes"] // shared, **sizes}, flags)


def row_of(link: str) -> str:
    """The row of a table in the recipes' page that holds a link, with single spaces."""
    (row,) = (line for line in README.splitlines() if line.startswith("|") and link in line)
    return " ".join(row.split())


def named(path: Path) -> str:
    return str(path.relative_to(LAUNCH).with_suffix(""))


every_file = pytest.mark.parametrize("path", FILES, ids=named)
every_paper_file = pytest.mark.parametrize("path", PAPER_FILES, ids=lambda path: path.stem)


@every_file
def test_accelerate_and_helix_take_the_file(path: Path):
    loaded = load_config_from_file(str(path))
    assert loaded.distributed_type.value == ("MULTI_GPU" if loaded.num_processes > 1 else "NO")
    assert loaded.use_cpu is path.stem.startswith("cpu")
    HelixConfig.from_mapping(loaded.parallelism_config["helix"], str(path))


@every_file
def test_the_layout_fits_processes_and_model(path: Path):
    recipe = recipe_of(path)
    sizes, config = recipe.sizes, config_of(recipe.model)
    assert sizes["dp"] % sizes["ep"] == 0, "expert parallelism takes its ranks from data parallelism"
    heads = config.num_attention_heads
    assert heads % sizes["tp"] == 0
    assert getattr(config, "num_key_value_heads", heads) % sizes["tp"] == 0
    assert 2 * sizes["pp"] <= config.num_hidden_layers
    if sizes["ep"] > 1:
        assert config.num_local_experts % (sizes["ep"] * sizes["tp"]) == 0


@every_file
def test_the_name_says_the_layout_and_the_page_lists_it(path: Path):
    recipe = recipe_of(path)
    link = f"(../{path.relative_to(ROOT)})"
    if path.stem == "helix":  # the one to copy
        assert link in README
        return
    row = row_of(link)
    layout = [f"{name}{size}" for name, size in recipe.sizes.items() if size > 1]
    assert " ".join(layout) in row
    assert ("**not run**" in row) == (not recipe.launch["use_cpu"]), "nothing was run on GPUs"
    if path in PAPER_FILES:
        assert re.fullmatch(f"{re.escape('_'.join([recipe.model, *layout]))}_64xA(40|800)", path.stem)
    else:  # no more ranks than the layout needs
        assert recipe.sizes["dp"] == recipe.sizes["ep"]
        kind, *parts = path.stem.split("_")
        assert kind == ("cpu" if recipe.launch["use_cpu"] else "gpu")
        assert sorted(parts) == sorted(part for part in layout if not part.startswith("dp"))


@every_paper_file
def test_the_papers_batch_on_the_papers_machines(path: Path):
    """8 Mi tokens, or 1600 sequences of Phi, on 8 machines of 8, with its sequence lengths."""
    recipe = recipe_of(path)
    assert (recipe.launch["num_machines"], recipe.launch["num_processes"]) == (8, 64)
    assert "main_process_ip" not in recipe.launch, "every cluster has its own"
    assert {recipe.flags["machine_rank"], recipe.flags["main_process_ip"]} == {"RANK", "HOST"}
    length = int(recipe.flags["sequence_length"])
    assert length <= config_of(recipe.model).max_position_embeddings
    steps, rows = (int(recipe.flags[name]) for name in ("gradient_accumulation_steps", "per_device_train_batch_size"))
    sequences = steps * rows * recipe.sizes["dp"]
    if recipe.model.startswith("phi"):
        assert (length, sequences) == (3072, 1600)
    else:
        assert sequences * length == 8 * 2**20
    row = row_of(f"(../{path.relative_to(ROOT)})")
    assert f"| {length} | {steps} |" in row


@every_paper_file
def test_the_states_on_a_gpu_as_the_page_says(path: Path):
    """Weights, gradients and the two states of AdamW in fp32; with `shard_optimizer`, states are shared over dp."""
    recipe = recipe_of(path)
    sizes, found = recipe.sizes, count(recipe.model)
    dense = (found.total - found.experts) / (sizes["tp"] * sizes["pp"])
    experts = found.experts / (sizes["tp"] * sizes["pp"] * sizes["ep"])
    copies = sizes["dp"] if recipe.launch["parallelism_config"]["helix"].get("shard_optimizer") else 1
    assert f"| {(dense + experts) * (8 + 8 / copies) / 1e9:.0f} GB |" in row_of(f"(../{path.relative_to(ROOT)})")


# The script


@pytest.fixture(scope="module")
def pretrain() -> Any:
    spec = importlib.util.spec_from_file_location("pretrain", ROOT / "recipes" / "pretrain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_overrides_count_as_if_they_stood_in_the_file(pretrain: Any):
    config = pretrain.read_config(str(MODELS / "llama-25b"), "hidden_size=64,num_attention_heads=4,rms_norm_eps=1e-3")
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (64, 16, 28)
    assert pretrain.read_config(str(MODELS / "gpt-18b" / "config.json"), "num_hidden_layers=2").n_layer == 2
    with pytest.raises(ValueError, match="llama has no layers; give what it has, such as --config_overrides num_"):
        pretrain.read_config(str(MODELS / "llama-25b"), "layers=2")


def test_sizes_that_do_not_fit_are_refused(pretrain: Any):
    config = config_of("tiny-gpt2")
    pretrain.check_sizes(config, 512, 512)
    with pytest.raises(ValueError, match="use --config_overrides vocab_size=513, or another --tokenizer_name"):
        pretrain.check_sizes(config, 513, 512)
    with pytest.raises(ValueError, match="use --config_overrides max_position_embeddings=513, or shorter"):
        pretrain.check_sizes(config, 512, 513)


# Runs, by the launcher's file

RUNS = (
    ("tiny-llama", "cpu_tp2"),
    ("tiny-llama", "cpu_pp2"),
    ("tiny-llama", "cpu_cp2"),
    ("tiny-mistral", "cpu_tp2"),
    ("tiny-qwen2", "cpu_tp2"),
    ("tiny-qwen3", "cpu_tp2"),
    ("tiny-gpt2", "cpu_tp2"),
    ("tiny-gpt2", "cpu_pp2"),
    ("tiny-gpt-neox", "cpu_tp2"),
    ("tiny-phimoe", "cpu_ep2"),
    ("tiny-phimoe", "cpu_tp2"),
    ("tiny-mixtral", "cpu_ep2"),
    ("tiny-qwen3-moe", "cpu_ep2"),
)
FAST = (RUNS[0],)


def launched(folder: Path, launch: str, script: str, *flags: str, limit: float = 280) -> str:
    """Launch a recipe, with a plan that needs no measuring; what it printed."""
    config = yaml.safe_load((LAUNCH / f"{launch}.yaml").read_text())
    config["main_process_port"] = free_port()
    config["parallelism_config"]["helix"].update(plan="greedy", schedule="w")
    (folder / "launch.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "launch.yaml"]
    process = subprocess.Popen(
        [*command, str(ROOT / "recipes" / script), *flags],
        cwd=folder,
        env={**os.environ, "HELIX_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(process.communicate()[0]) from None
    assert process.returncode == 0, output
    return output


def run_recipe(folder: Path, launch: str, *flags: str) -> str:
    """Launch the first recipe on a text of sums."""
    (folder / "text.txt").write_text("\n\n".join(f"{n} and {n + 1} make {2 * n + 1}." for n in range(400)))
    return launched(folder, launch, "pretrain.py", "--text", "text.txt", "--output_dir", "out", *flags)


@pytest.mark.parametrize(
    ("model", "launch"), [pytest.param(*run, marks=() if run in FAST else pytest.mark.slow) for run in RUNS]
)
def test_the_recipe_trains_every_family(model: str, launch: str, tmp_path: Path):
    """`accelerate launch` trains, evaluates, measures, saves, loads, generates and writes a card."""
    flags = ["--config_name", str(MODELS / model), "--sequence_length", "32", "--max_steps", "3"]
    output = run_recipe(tmp_path, launch, *flags)
    for said in ("loss on held-out text: ", "plan greedy: ", "loaded back, it writes: "):
        assert output.count(said) == 1, output
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == config_of(model).architectures
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == config.vocab_size
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "hf_helix" in card.data.tags
    assert card.data.base_model is None
    assert "trained from scratch on the text.txt dataset" in card.text
    size = re.fullmatch(r"cpu_(..)2", launch)
    assert size is not None
    assert f"{size[1]}=2" in card.text


@pytest.mark.slow
def test_the_recipe_on_an_emulated_link_ends_with_the_gain(tmp_path: Path):
    """What `make demo` shows, on a tiny model: table, picture, other links, and the machine as it is."""
    flags = ["--config_name", str(MODELS / "tiny-llama"), "--sequence_length", "32", "--max_steps", "3"]
    output = run_recipe(tmp_path, "cpu_tp2", *flags, "--link", "300mbit")
    for said in (
        "hf_helix: emulated link: 300 Mbit/s; ",
        "over an emulated link of 300 Mbit/s; everything else is real",
        "without the emulated link, measured: sequential ",
        "one strand (sequential): ",
        "two strands (greedy): ",
        "loaded back, it writes: ",
    ):
        assert output.count(said) == 1, output
    assert len(re.findall(r"^  (75|150|300|600) Mbit/s |^  1.2 Gbit/s ", output, re.MULTILINE)) == 5, output
    assert "an emulated link of 300 Mbit/s" in (tmp_path / "out" / "README.md").read_text()
    for name in ("plan.json", "profile.json", "plan.svg", "plan.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0


def test_every_family_is_run():
    """And the page says so."""
    assert {model for model, _ in RUNS} == {model for model in ALL_MODELS if model.startswith("tiny-")}
    for model in dict(RUNS):
        row = row_of(f"(models/{model}/config.json)")
        assert all(f"`{launch}`" in row for name, launch in RUNS if name == model)


@pytest.mark.slow
def test_the_shape_of_a_large_model_made_small(tmp_path: Path):
    """Any configuration runs on a CPU with a few values changed; the page shows how."""
    sizes = "num_hidden_layers=4,hidden_size=64,intermediate_size=160,num_attention_heads=4,num_key_value_heads=2"
    assert f"--config_overrides {sizes},vocab_size=512" in README
    flags = ["--config_name", str(MODELS / "llama-25b"), "--config_overrides", f"{sizes},vocab_size=512"]
    run_recipe(tmp_path, "cpu_tp2", *flags, "--sequence_length", "32", "--max_steps", "3")


@pytest.mark.slow
def test_the_loop_around_accelerate(tmp_path: Path):
    """Its layout is the launcher's, it learns, and what it saves loads. The page lists it."""
    output = launched(tmp_path, "cpu_tp2", "accelerate_loop.py", "6")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", output)]
    assert len(losses) == 6, output
    assert losses[-1] < losses[0]
    assert output.count("loss on held-out text: ") == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "accelerate_loop")
    source = (ROOT / "recipes" / "accelerate_loop.py").read_text()
    assert len(source.splitlines()) < 60
    assert "recipes/accelerate_loop.py" in README


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "flags"),
    [("cpu_tp2", ["--pairs", "pairs.jsonl"]), ("cpu_tp2", ["--packing"]), ("cpu_pp2", ["--packing"])],
)
def test_fine_tuning_with_trl(launch: str, flags: list[str], tmp_path: Path):
    """On prompts and completions of one's own, or Python's documentation. The page lists the layouts."""
    pairs = [{"prompt": f"{n} and {n + 1} make", "completion": f" {2 * n + 1}."} for n in range(100)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    output = launched(tmp_path, launch, "sft.py", "--output_dir", "out", "--max_steps", "3", *flags)
    assert output.count("loss on held-out completions: ") == 1, output
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) <= config.vocab_size
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert {"hf_helix", "trl", "sft"} <= set(card.data.tags)
    assert f"`{launch}`" in row_of("(sft.py)")


@pytest.mark.slow
def test_adapters_of_a_trained_model(tmp_path: Path):
    """What one recipe leaves another adapts; stock PEFT loads and merges it."""
    flags = ["--sequence_length", "32", "--max_steps", "3"]
    run_recipe(tmp_path, "cpu_tp2", "--config_name", str(MODELS / "tiny-llama"), *flags)
    flags += ["--model_name_or_path", "out", "--output_dir", "adapters", "--lora_r", "4"]
    output = launched(tmp_path, "cpu_tp2", "lora.py", "--text", "text.txt", *flags)
    for said in ("loss on held-out text: ", "plan greedy: ", "adapters: adapters", "merged, it writes: "):
        assert output.count(said) == 1, output
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    assert "hf_helix" in ModelCard.load(tmp_path / "adapters" / "README.md").data.tags
