"""Recipes run as their pages say: they train, save what loads, and print what they promise."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from support.forked_ranks import fork_ranks, logs_of
from support.launches import accelerate, launch_config, output_of
from support.paths import ROOT
from support.recipes import ALL_MODELS, MODELS, README, config_of, row_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

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
    ("tiny-gemma3", "cpu_tp2"),
    ("tiny-phi3", "cpu_tp2"),
    ("tiny-qwen2-moe", "cpu_ep2"),
)


def launched(folder: Path, launch: str, script: str, *flags: str, limit: float = 280) -> str:
    """Launch a recipe, with a plan that needs no measuring; what it printed."""
    config = launch_config(folder, launch)
    options = yaml.safe_load(config.read_text())
    options["parallelism_config"]["helix"].update(plan="greedy", schedule="folded_1f1b")
    config.write_text(yaml.safe_dump(options))
    process = accelerate(config, ROOT / "recipes" / script, *flags, HELIX_CACHE=str(folder / "cache"))
    output = output_of(process, limit)
    assert process.returncode == 0, output
    return output


def run_recipe(folder: Path, launch: str, *flags: str) -> str:
    """Launch the first recipe on a text of sums."""
    return launched(folder, launch, "pretrain.py", *text_in(folder), "--output_dir", "out", *flags)


def text_in(folder: Path) -> tuple[str, ...]:
    """The flags of a text, which is written."""
    (folder / "text.txt").write_text("\n\n".join(f"{n} and {n + 1} make {2 * n + 1}." for n in range(400)))
    return ("--text", "text.txt")


FEW_STEPS = ("--sequence_length", "32", "--max_steps", "3")


def test_the_recipe_trains(tmp_path: Path):
    """On ranks that are forked, with the options that the launcher's YAML would give them."""
    flags = (*text_in(tmp_path), "--output_dir", "out", "--config_name", MODELS / "tiny-llama", *FEW_STEPS)
    flags += ("--trace", "trace.json")
    helix = "tp_size: 2\nplan: greedy\n"
    ranks = fork_ranks(tmp_path, ROOT / "recipes" / "pretrain.py", *flags, helix=helix)
    check_trained(tmp_path, logs_of(ranks, tmp_path), "tiny-llama", "tp=2")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "launch"), RUNS)
def test_the_recipe_trains_every_family(model: str, launch: str, tmp_path: Path):
    """Under `accelerate launch`: layout and plan are those of the launcher's YAML."""
    output = run_recipe(tmp_path, launch, "--config_name", str(MODELS / model), *FEW_STEPS)
    size = re.fullmatch(r"cpu_(..)2", launch)
    assert size is not None
    check_trained(tmp_path, output, model, f"{size[1]}=2")


def check_trained(folder: Path, output: str, model: str, layout: str) -> None:
    """The recipe has trained, evaluated, measured, saved, loaded, generated and written a card; rank 0 alone talks."""
    for said in ("'train_runtime'", "loss on held-out text: ", "plan greedy: ", "loaded back, it writes: "):
        assert output.count(said) == 1, output
    config = AutoConfig.from_pretrained(folder / "out")
    assert config.architectures == config_of(model).architectures
    assert len(AutoTokenizer.from_pretrained(folder / "out")) == config.vocab_size
    card = ModelCard.load(folder / "out" / "README.md")
    assert "hf_helix" in card.data.tags
    assert card.data.base_model is None
    assert "trained from scratch on the text.txt dataset" in card.text
    assert layout in card.text


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
    for name in ("plan.json", "profile.json", "plan.svg"):
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


PREFERENCES = (
    ("dpo.py", "cpu_tp2", []),
    ("dpo.py", "cpu_pp2", []),
    ("dpo.py", "cpu_tp2", ["--use_peft"]),
    ("reward.py", "cpu_tp2", []),
    ("reward.py", "cpu_pp2", []),
    ("grpo.py", "cpu_tp2", []),
    ("grpo.py", "cpu_pp2", ["--beta", "0.04"]),
)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "launch", "flags"), PREFERENCES)
def test_preferences_and_rewards(script: str, launch: str, flags: list[str], tmp_path: Path):
    """TRL's trainers with losses of their own, on what the recipes make; what they leave loads. The page lists them."""
    output = launched(tmp_path, launch, script, "--output_dir", "out", "--max_steps", "2", *flags)
    assert output.count("plan greedy; checkpoint: out") == 1, output
    assert output.count("mean reward: " if script == "grpo.py" else "held-out pairs: loss ") == 1, output
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() == ("--use_peft" in flags)
    if "--use_peft" not in flags:
        kind = AutoModelForSequenceClassification if script == "reward.py" else AutoModelForCausalLM
        config = kind.from_pretrained(tmp_path / "out").config
        assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) <= config.vocab_size
    assert f"`{launch}`" in row_of(f"({script})")


@pytest.mark.slow
def test_a_reward_model_rewards(tmp_path: Path):
    """What one recipe leaves another takes."""
    launched(tmp_path, "cpu_tp2", "reward.py", "--output_dir", "reward", "--max_steps", "2")
    output = launched(tmp_path, "cpu_tp2", "grpo.py", "--reward_model", "reward", "--max_steps", "2")
    assert output.count("mean reward: ") == 1, output


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
