"""Recipes run as their pages say: they train, save what loads, and print what they promise."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard
from support.cards import launch_file
from support.cluster import free_port
from support.forked_ranks import fork_ranks, logs_of
from support.launches import accelerate, launch_config, output_of, start
from support.paths import ROOT
from support.recipes import MODELS, README, config_of, row_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_helix import HelixConfig
from hf_helix.integrations.trainer.model_card import format_launch

RUNS = (
    ("tiny-llama", "cpu_pp2"),
    ("tiny-llama", "cpu_cp2"),
    ("tiny-gpt2", "cpu_tp2"),
    ("tiny-phimoe", "cpu_ep2"),
    ("tiny-gemma3", "cpu_tp2"),
)
"""One of each layout, declared and derived; the classes themselves are compared with the stock Trainer elsewhere."""


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
def test_the_recipe_is_launched(model: str, launch: str, tmp_path: Path):
    """Under `accelerate launch`: layout and plan are those of the launcher's YAML."""
    output = run_recipe(tmp_path, launch, "--config_name", str(MODELS / model), *FEW_STEPS)
    size = re.fullmatch(r"cpu_(..)2", launch)
    assert size is not None
    check_trained(tmp_path, output, model, f"{size[1]}=2")
    assert f"`{launch}`" in row_of(f"(models/{model}/config.json)")


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


EXPERTS = "--tiny tiny-mixtral --use_peft --lora_target_modules all-linear"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "launch", "flags", "said"),
    [
        ("sft.py", "cpu_tp2", ["--train_file", "pairs.jsonl"], "loss on held-out completions: "),
        ("sft.py", "cpu_tp2", ["--chat", "--assistant_only_loss"], "loss on held-out completions: "),
        ("sft.py", "cpu_pp2", ["--packing"], "loss on held-out completions: "),
        ("dpo.py", "cpu_pp2", [], "held-out pairs: loss "),
        ("dpo.py", "cpu_tp2", ["--use_peft"], "held-out pairs: loss "),
        ("reward.py", "cpu_pp2", [], "held-out pairs: loss "),
        ("grpo.py", "cpu_pp2", ["--beta", "0.04"], "mean reward: "),
        ("grpo.py", "cpu_ep2", EXPERTS.split(), "mean reward: "),
        ("grpo.py", "cpu_tp2", ["--reward_model", "reward"], "mean reward: "),  # that another recipe leaves
    ],
)
def test_recipes_with_trl(script: str, launch: str, flags: list[str], said: str, tmp_path: Path):
    """On what the recipes make, or pairs of one's own; what they leave loads. The page lists the layouts."""
    pairs = [{"prompt": f"{n} and {n + 1} make", "completion": f" {2 * n + 1}."} for n in range(100)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    if "--reward_model" in flags:
        launched(tmp_path, launch, "reward.py", "--output_dir", "reward", "--max_steps", "2")
    output = launched(tmp_path, launch, script, "--output_dir", "out", "--max_steps", "2", *flags)
    assert output.count(said) == 1, output
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() == ("--use_peft" in flags)
    if "--use_peft" not in flags:
        kind = AutoModelForSequenceClassification if script == "reward.py" else AutoModelForCausalLM
        config = kind.from_pretrained(tmp_path / "out").config
        assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) <= config.vocab_size
    if script == "sft.py":
        assert {"hf_helix", "trl", "sft"} <= set(ModelCard.load(tmp_path / "out" / "README.md").data.tags)
    assert f"`{launch}`" in row_of(f"({script})")


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


@pytest.mark.slow
def test_a_trained_model_is_trained_further(tmp_path: Path):
    """What one recipe leaves another goes on with, and begins where the first has ended."""
    flags = ["--config_name", str(MODELS / "tiny-llama"), *FEW_STEPS, "--logging_steps", "1"]
    first = run_recipe(tmp_path, "cpu_tp2", *flags)
    flags = ["--model_name_or_path", "out", "--text", "text.txt", *FEW_STEPS, "--logging_steps", "1"]
    second = launched(tmp_path, "cpu_pp2", "pretrain.py", *flags, "--output_dir", "further")
    before, after = (re.findall(r"'loss': '?([\d.]+)", said) for said in (first, second))
    assert float(after[0]) < float(before[-1]) + 0.1
    assert "loaded back" not in second  # rank 0 would hold the whole model
    assert AutoConfig.from_pretrained(tmp_path / "further").architectures == ["LlamaForCausalLM"]
    assert ModelCard.load(tmp_path / "further" / "README.md").data.base_model == "out"


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["cpu_ep2", "cpu_tp2"])
def test_experts_are_balanced(launch: str, tmp_path: Path):
    """Without a loss: the busiest expert has less to do at last than at first."""
    flags = ["--output_dir", "out", "--max_steps", "20", "--rate", "0.02", "--learning_rate", "3e-4"]
    output = launched(tmp_path, launch, "balance.py", *flags)
    (found,) = re.findall(r"mean load: (\S+) at first, (\S+) at last", output)
    assert float(found[1]) < float(found[0]), output
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert f"`{launch}`" in row_of("(balance.py)")


@pytest.mark.slow
def test_a_student_of_a_trained_model(tmp_path: Path):
    """What one recipe leaves another distils; the student comes closer to its teacher, and loads."""
    flags = ["--sequence_length", "32", "--text", "text.txt"]
    run_recipe(tmp_path, "cpu_tp2", "--config_name", str(MODELS / "tiny-llama"), "--max_steps", "6", *flags[:2])
    flags += ["--teacher_name_or_path", "out", "--output_dir", "student", "--student_layers", "1", "--max_steps", "8"]
    output = launched(tmp_path, "cpu_tp2", "distill.py", *flags)
    (found,) = re.findall(r"held-out text: (\S+) before, (\S+) after", output)
    assert float(found[1]) < float(found[0]), output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "student").config.num_hidden_layers == 1
    assert "`cpu_tp2`" in row_of("(distill.py)")


@pytest.mark.slow
def test_the_card_of_two_machines_starts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch file of a model card starts as the card says: two launchers of one process each, here."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    card = SimpleNamespace(text=format_launch(HelixConfig(tp_size=2, plan="greedy"), 2, "no", use_cpu=True))
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    (command,) = re.findall(r"`accelerate (launch .*) YOUR_SCRIPT.py`", card.text)
    words = command.replace("FILE", str(launch_file(card, tmp_path))).replace("HOST", "127.0.0.1")
    words += f" --main_process_port {free_port()}"  # of a machine that other tests share
    flags = ["--config_name", MODELS / "tiny-llama", "--sequence_length", 32, "--max_steps", 2, "--output_dir", "out"]
    recipe = [ROOT / "recipes" / "pretrain.py", *flags]
    commands = (words.replace("RANK", rank).split()[1:] for rank in ("0", "1"))
    started = [start(tmp_path, ["-m", "accelerate.commands.launch", *given, *recipe]) for given in commands]
    said = [output_of(process, 200) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "tp=2" in (tmp_path / "out" / "README.md").read_text()
    assert "--machine_rank RANK --main_process_ip HOST" in (tmp_path / "out" / "README.md").read_text()
