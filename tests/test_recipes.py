"""Recipes: model configurations have the shapes they are named for, layouts fit them, and pages say what there is."""

import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from support.paths import ROOT
from support.recipes import ALL_MODELS, LAUNCH, MODELS, README, config_of, row_of
from transformers import AutoModelForCausalLM

from hf_helix import HelixConfig
from hf_helix.cli.models import SUPPORTED

FILES = sorted(LAUNCH.rglob("*.yaml"))
PAPER_FILES = sorted((LAUNCH / "paper").glob("*.yaml"))
AXES = ("dp", "tp", "cp", "pp", "ep")

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
DERIVED = ("tiny-gemma3", "tiny-phi3", "tiny-qwen2-moe")
"""Small models of classes that are not declared: a Gemma, a Phi, a mixture."""

# Models


class Count(NamedTuple):
    """Parameters."""

    layers: int
    experts: int  # of the layers
    rest: int

    @property
    def total(self) -> int:
        return self.layers + self.rest


@cache
def built(model: str) -> Any:
    """On no device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(model))


@cache
def count(model: str) -> Count:
    sizes = {name: weight.numel() for name, weight in built(model).named_parameters()}
    in_layers = {name: size for name, size in sizes.items() if re.search(r"\.(layers|h)\.\d+\.", name)}
    experts = sum(size for name, size in in_layers.items() if ".experts." in name)
    layers = sum(in_layers.values())
    return Count(layers, experts, sum(sizes.values()) - layers)


@pytest.mark.parametrize("model", ALL_MODELS)
def test_a_configuration_makes_the_model_it_names(model: str):
    config = config_of(model)
    assert [type(built(model)).__name__] == config.architectures
    assert config.architectures[0] in SUPPORTED or model in DERIVED
    assert f"(models/{model}/config.json)" in README


@pytest.mark.parametrize("model", PAPER_LAYERS)
def test_the_papers_models_have_its_numbers_of_parameters(model: str):
    result = count(model)
    assert round(result.layers / 1e9, 1) == PAPER_LAYERS[model]
    # The name is the number of the layers, of the whole, or between them; to 1 %.
    named = float(model.rpartition("-")[2].removesuffix("b")) * 1e9
    assert 0.99 * result.layers <= named <= 1.01 * result.total
    assert f"| {result.total / 1e9:.1f} |" in row_of(f"(models/{model}/config.json)")


def test_every_family_has_a_small_model():
    small = {config_of(model).architectures[0] for model in ALL_MODELS if model.startswith("tiny-")}
    derived = {config_of(model).architectures[0] for model in DERIVED}
    assert small - derived == set(SUPPORTED)
    assert len(derived - set(SUPPORTED)) == len(DERIVED)
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


def named(path: Path) -> str:
    return str(path.relative_to(LAUNCH).with_suffix(""))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LAUNCH).with_suffix("")))
def test_the_layout_is_taken_fits_the_model_and_is_listed_as_its_name_says(path: Path):
    loaded = load_config_from_file(str(path))
    assert loaded.distributed_type.value == ("MULTI_GPU" if loaded.num_processes > 1 else "NO")
    assert loaded.use_cpu is path.stem.startswith("cpu")
    HelixConfig.from_mapping(loaded.parallelism_config["helix"], str(path))
    recipe = recipe_of(path)
    sizes, config = recipe.sizes, config_of(recipe.model)
    assert sizes["dp"] % sizes["ep"] == 0, "expert parallelism takes its ranks from data parallelism"
    heads = config.num_attention_heads
    assert heads % sizes["tp"] == getattr(config, "num_key_value_heads", heads) % sizes["tp"] == 0
    assert 2 * sizes["pp"] <= config.num_hidden_layers
    assert sizes["ep"] == 1 or config.num_local_experts % (sizes["ep"] * sizes["tp"]) == 0
    link = f"(../{path.relative_to(ROOT)})"
    if path.stem == "helix":  # the one to copy
        assert link in README
        return
    row = row_of(link)
    layout = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    assert " ".join(layout) in row
    assert ("**not run**" in row) == (not recipe.launch["use_cpu"]), "nothing was run on GPUs"
    if path in PAPER_FILES:
        assert re.fullmatch(f"{re.escape('_'.join([recipe.model, *layout]))}_64xA(40|800)", path.stem)
    else:  # no more ranks than the layout needs
        assert sizes["dp"] == sizes["ep"]
        kind, *parts = path.stem.split("_")
        assert kind == ("cpu" if recipe.launch["use_cpu"] else "gpu")
        assert sorted(parts) == sorted(part for part in layout if not part.startswith("dp"))


@pytest.mark.parametrize("path", PAPER_FILES, ids=lambda path: path.stem)
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
    # Weights, gradients and the two states of AdamW in fp32 on a GPU; `shard_optimizer` shares the states over dp.
    sizes, result = recipe.sizes, count(recipe.model)
    dense = (result.total - result.experts) / (sizes["tp"] * sizes["pp"])
    experts = result.experts / (sizes["tp"] * sizes["pp"] * sizes["ep"])
    copies = sizes["dp"] if recipe.launch["parallelism_config"]["helix"].get("shard_optimizer") else 1
    assert f"| {(dense + experts) * (8 + 8 / copies) / 1e9:.0f} GB |" in row


# The script


@pytest.fixture(scope="module")
def pretrain() -> Any:
    return recipe_module("pretrain")


def recipe_module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up, and recipes each other
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


def test_what_a_trained_model_says_itself_is_refused(pretrain: Any):
    recipe = pretrain.RecipeArguments(model_name_or_path=str(MODELS / "tiny-llama"))
    assert pretrain.checkpoint_of(recipe, None) == recipe.model_name_or_path
    recipe.config_overrides = "num_hidden_layers=2"
    with pytest.raises(ValueError, match="has its own configuration; leave --config_overrides out"):
        pretrain.checkpoint_of(recipe, None)


def test_lines_of_another_kind_are_refused(pretrain: Any, tmp_path: Path):
    sft = recipe_module("sft")
    chat = {"messages": sft.chat_of({"prompt": "What?\n", "completion": "That."}), "source": "here"}
    for name, row in (("chats", chat), ("texts", {"text": "That."})):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n")
    rows = sft.read_rows(str(tmp_path / "chats.jsonl"))
    assert rows.column_names == ["messages"]
    assert sft.texts_of(rows[0]) == ["What?", "That."]
    with pytest.raises(ValueError, match=r"lines with text, and completion, prompt is missing: give lines \{"):
        sft.read_rows(str(tmp_path / "texts.jsonl"))


def test_a_model_of_the_hub_has_its_shape_from_a_folder_without_the_hub(pretrain: Any, capsys: Any):
    config = pretrain.read_config("Qwen/Qwen3-8B", "num_hidden_layers=2")
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("qwen3", 4096, 2)
    assert "the Hub gives no configuration of Qwen/Qwen3-8B; its shape is read from " in capsys.readouterr().out
    assert pretrain.reachable(str(MODELS / "tiny-llama")) == str(MODELS / "tiny-llama")
    with pytest.raises(OSError, match="connect"):
        pretrain.read_config("nobody/nothing", "")
