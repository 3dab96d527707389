"""Weights that no rank ever has whole, from a checkpoint or at random, against those of models that are made whole."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.comparisons import stored
from support.derived_models import HOME
from support.jobs import build
from support.marks import slow
from support.models import sequences, tiny
from support.paths import ROOT
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import llama as benchmark_llama
from hf_helix import HelixTrainer
from hf_helix.checkpoint.load import load_parameters
from hf_helix.runtime.divided import plain_parameters

# -- what the ranks run ------------------------------------------------------------------------------------------------

STEPS = 2


def trainer_of(folder: str, helix: dict[str, Any], model: Any, **options: Any) -> Any:
    training, data = {"max_steps": STEPS, "weight_decay": 0.0}, sequences(8, lengths=(16,))
    return build(folder, {"plan": "greedy", **helix}, training, model=model, train_dataset=data, **options)


@plain_parameters()
def held(trainer: HelixTrainer) -> dict[str, Any]:
    """Everything that this rank has of a model, buffers and what is not trained included; of parameters that are
    spread, its parts."""
    model, shards = trainer.model, trainer.helix.runner.rank_units.shards
    result: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        mine = shards.get(tensor, tensor)
        result[name] = (mine.detach().clone(), mine.requires_grad)
    return result


def differences(result: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not equal bit for bit, in shape, type, or in being trained."""
    assert result.keys() == expected.keys()
    assert any(value.numel() == 0 for value, _ in expected.values()) or len(expected) > 10
    return [name for name, (value, trained) in expected.items() if not _same(result[name], value, trained)]


def _same(result: tuple[Tensor, bool], value: Tensor, trained: bool) -> bool:
    other, other_trained = result
    fits = other.shape == value.shape and other.dtype == value.dtype and other.device == value.device
    return fits and other_trained is trained and torch.equal(other, value)


def losses(trainer: HelixTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def outline(family: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model on the meta device."""
    config = tiny(family, **changes).config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@plain_parameters()
def start_in_every_way(
    folder: str, helix: dict[str, Any], source: str, family: str, changes: dict[str, Any], train: bool = False
) -> dict[str, Any]:
    """What a rank holds, and, if asked for, how it trains, from the checkpoint `source`: loaded whole and cut; from the
    folder, by its name; by a model on the meta device and the folder; and put into a model that was cut with other
    weights.
    """
    whole = trainer_of(folder, helix, AutoModelForCausalLM.from_pretrained(source))
    expected = held(whole)
    named = trainer_of(folder, helix, source)
    empty = outline(family, changes, whole.model.dtype)
    ours = [id(parameter) for parameter in empty.parameters()]
    meta = trainer_of(folder, helix, empty, weights=source)
    assert ours == [id(parameter) for parameter in meta.model.parameters()], "parameters stay the same objects"
    other = AutoModelForCausalLM.from_config(whole.model.config, dtype=whole.model.dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    again = trainer_of(folder, helix, other)
    load_parameters(again.model, again.helix.runner.rank_units, again.helix.mesh, source)
    result = {"named": named, "meta": meta, "again": again}
    return {
        "differences": {how: differences(held(trainer), expected) for how, trainer in result.items()},
        "losses": [losses(trainer) for trainer in (whole, named, meta, again) if train],
        "configurations": [
            [made.model.config.to_dict(), made.model.generation_config.to_dict()] for made in (whole, named)
        ],
        "bytes": sum(value.nbytes for value, _ in expected.values()),
    }


@plain_parameters()
def refused(folder: str, helix: dict[str, Any], source: str, model: dict[str, Any], own_folder: bool = False) -> None:
    """Load what does not fit into a cut model; nothing of it may change."""
    trainer = trainer_of(folder, helix, tiny(**model))
    before = held(trainer)
    source = f"{source}/{os.environ['RANK']}" if own_folder else source
    try:
        load_parameters(trainer.model, trainer.helix.runner.rank_units, trainer.helix.mesh, source)
    finally:
        assert not differences(held(trainer), before)


def construct(
    folder: str, name: str = "", on_meta: bool = True, partly: str = "", adapters: bool = False, **options: Any
) -> None:
    """Only construct, with the name of a model, or a model on the meta device or not."""
    made: Any = outline("llama", {}) if on_meta else tiny()
    if partly:
        holder, _, weight = partly.rpartition(".")
        real = torch.ones(made.get_parameter(partly).shape)
        setattr(made.get_submodule(holder), weight, nn.Parameter(real))
    if adapters:
        with torch.device("meta"):
            made = get_peft_model(made, LoraConfig(target_modules=["q_proj"]))
    trainer_of(folder, {"tp_size": 2}, name or made, **options)


@plain_parameters()
def draw(folder: str, helix: dict[str, Any], family: str, changes: dict[str, Any], dtype: str = "float32") -> list[str]:
    """Start from a model on the meta device alone, train nothing, save; what is left on the meta device."""
    trainer = trainer_of(folder, helix, outline(family, changes, getattr(torch, dtype)))
    trainer.save_model(folder)
    return [name for name, (value, _) in held(trainer).items() if value.is_meta]


# -- the tests --------------------------------------------------------------------------------------------------------

LAYERS = {"num_hidden_layers": 4}
TIED = {"tie_word_embeddings": True}
SPREAD = {"shard_parameters": True}
CASES: list[Any] = [
    # family, changes, layout, shards of the checkpoint
    ("phimoe", LAYERS, {"pp_size": 2}, "20KB"),
    ("llama", {**TIED, **LAYERS}, SPREAD, "20KB"),
    slow("llama", TIED, {"tp_size": 2}, "20KB"),
    slow("gpt2", {}, {"tp_size": 2}, "1GB"),
    slow("phimoe", {}, {"ep_size": 2}, "1GB"),
    slow("llama", {**TIED, **LAYERS}, {"shard_optimizer": True}, "20KB"),
    slow("mixtral", LAYERS, {"ep_size": 2, "tp_size": 2}, "20KB"),
    slow("qwen3_moe", LAYERS, {"tp_size": 2, "pp_size": 2}, "20KB"),
    slow("mixtral", LAYERS, {"tp_size": 2, **SPREAD}, "20KB"),
    slow(f"{HOME}phi3", {"num_hidden_layers": 2}, {"tp_size": 2}, "20KB"),
    slow(f"{HOME}gpt_oss", LAYERS, {"pp_size": 2}, "20KB"),
]


def ranks_of(layout: dict[str, int]) -> int:
    return math.prod(2 if size is True else size for size in layout.values())


@pytest.mark.parametrize(("family", "changes", "layout", "shards"), CASES)
def test_a_folder_gives_what_from_pretrained_gives(
    family: str, changes: dict[str, Any], layout: dict[str, int], shards: str, cluster_of: Any, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    tiny(family, **changes).save_pretrained(source, max_shard_size=shards)
    assert (len(list(source.glob("*.safetensors"))) > 1) is (shards == "20KB")
    job = {"folder": str(tmp_path), "helix": layout, "source": str(source), "family": family, "changes": changes}
    for rank in cluster_of(ranks_of(layout)).run(start_in_every_way, train=True, **job):
        assert rank["differences"] == {"named": [], "meta": [], "again": []}
        assert len(rank["losses"][0]) == 2
        assert all(result == rank["losses"][0] for result in rank["losses"])
        assert rank["configurations"][0] == rank["configurations"][1]
        assert rank["bytes"] > 0


def test_types_are_those_of_the_config(cluster_of: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny(dtype="bfloat16").save_pretrained(source)
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, "source": str(source), "family": "llama", "changes": {}}
    for rank in cluster_of(2).run(start_in_every_way, **job):
        assert rank["differences"] == {"named": [], "meta": [], "again": []}


def test_a_base_models_checkpoint_has_no_prefix(cluster_of: Any, tmp_path: Path) -> None:
    """As those of GPT-2 on the Hub, with masks that older versions have saved."""
    model, source = tiny("gpt2"), tmp_path / "source"
    model.save_pretrained(source)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(source / FILE).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(3)}
    save_file({**tensors, **masks}, source / FILE, {"format": "pt"})
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, "source": str(source), "family": "gpt2", "changes": {}}
    for rank in cluster_of(2).run(start_in_every_way, **job):
        assert rank["differences"] == {"named": [], "meta": [], "again": []}


# -- what does not fit -------------------------------------------------------------------------------------------

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Damage = Callable[[Path], None]


def changed(change: Callable[[dict[str, Any]], None]) -> Damage:
    """A single file with other tensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        change(tensors)
        save_file(tensors, folder / FILE, {"format": "pt"})

    return damage


def in_shards(change: Callable[[Path, dict[str, str]], None]) -> Damage:
    """Several files, of which some are changed."""

    def damage(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / FILE).unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
        change(folder, json.loads((folder / INDEX).read_text())["weight_map"])

    return damage


def put(name: str, value: torch.Tensor) -> Damage:
    return changed(lambda tensors: tensors.update({name: value}))


def cut_off(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[: len(data) // 2])


def as_bin(folder: Path) -> None:
    (folder / FILE).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def only_here(folder: Path) -> None:
    """Good for rank 0, and nothing for rank 1."""
    shutil.copytree(folder, folder / "0")
    (folder / "1").mkdir()


def of_other_models(folder: Path) -> None:
    for rank in range(2):
        shutil.copytree(folder, folder / f"new{rank}")
    changed(lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].bfloat16()}))(
        folder / "new1"
    )
    for rank in range(2):
        (folder / f"new{rank}").rename(folder / str(rank))


LLAMA: dict[str, Any] = {}
MOE = {"family": "phimoe"}
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BAD: dict[str, tuple[dict[str, Any], Damage, list[str]]] = {
    "missing tensor": (LLAMA, changed(lambda tensors: tensors.pop(UP)), ["nothing for", UP]),
    "unknown tensor": (LLAMA, put("model.extra", torch.ones(2)), ["no place for", "model.extra"]),
    "shape": (LLAMA, put(UP, torch.ones(57, 31)), [UP, "[57, 31]", "[57, 32]"]),
    "type": (LLAMA, put(NORM, torch.ones(32, dtype=torch.int8)), [NORM, "I8", "BF16"]),
    "missing head": (LLAMA, changed(lambda tensors: tensors.pop("lm_head.weight")), ["nothing for", "lm_head.weight"]),
    "both ends, other values": (
        TIED,
        put("lm_head.weight", torch.ones(131, 32)),
        ["embed_tokens.weight", "lm_head.weight", "differ", "tie_word_embeddings=False"],
    ),
    "missing expert": (
        MOE,
        changed(lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight")),
        ["model.layers.1.mlp.experts.down_proj", "[3, 32, 40]", "[4, 32, 40]"],
    ),
    "half an expert": (
        MOE,
        changed(lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")),
        ["model.layers.1.mlp.experts.gate_up_proj", "cannot be made of"],
    ),
    "cut off": (LLAMA, cut_off, [FILE, "cannot be read", "cut off"]),
    "missing file": (
        LLAMA,
        in_shards(lambda folder, places: (folder / places[UP]).unlink()),
        ["-of-", ".safetensors is missing", INDEX],
    ),
    "wrong index": (
        LLAMA,
        in_shards(
            lambda folder, places: (folder / INDEX).write_text(
                json.dumps({"weight_map": {**places, "nowhere": places[UP]}})
            )
        ),
        ["has no nowhere", INDEX],
    ),
    "no index": (
        LLAMA,
        in_shards(lambda folder, places: (folder / INDEX).write_text("{}")),
        [INDEX, "no index of safetensors"],
    ),
    "pickle": (LLAMA, as_bin, ["pytorch_model.bin", "save_pretrained"]),
    "no folder": (LLAMA, shutil.rmtree, ["source is no folder", "hf download"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named_on_every_rank_and_nothing_is_written(
    case: str, cluster_of: Any, tmp_path: Path
) -> None:
    changes, damage, words = BAD[case]
    model = {**changes, **LAYERS}
    tiny(**model).save_pretrained(tmp_path / "source")
    damage(tmp_path / "source")
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, "source": str(tmp_path / "source"), "model": model}
    cluster_of(2).assert_raises(refused, *words, **job)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(only_here, ["1", "neither"]), (of_other_models, ["rank 0 and rank 1", "different tensors", NORM])],
    ids=["missing", "other"],
)
def test_folders_that_differ_between_hosts(damage: Damage, words: list[str], cluster_of: Any, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "source")
    damage(tmp_path / "source")
    job = {"folder": str(tmp_path), "helix": {"tp_size": 2}, "source": str(tmp_path / "source"), "model": {}}
    first, _ = cluster_of(2).assert_raises(refused, *words, own_folder=True, **job)
    if damage is only_here:
        assert "on rank 1" in first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partly": NORM}, ["meta device", NORM, "all of them"]),
        ({"on_meta": False, "weights": "somewhere"}, ["weights='somewhere'", 'torch.device("meta")']),
        ({"weights": "nowhere"}, ["nowhere is no folder"]),
        ({"adapters": True}, ["PEFT adapters", "meta device", "from_pretrained(folder)"]),
        ({"name": "gpt2"}, ["model='gpt2'", "no folder", "hf download"]),
        ({"name": "here", "weights": "there"}, ["model='here'", "weights='there'", "leave it out"]),
    ],
    ids=str,
)
def test_models_that_cannot_be_filled(
    options: dict[str, Any], words: list[str], cluster_of: Any, tmp_path: Path
) -> None:
    cluster_of(2).assert_raises(construct, *words, folder=str(tmp_path), **options)


# -- at random ---------------------------------------------------------------------------------------------------


DRAWN: list[Any] = [
    ("llama", {**LAYERS, **TIED}, ({"tp_size": 2}, {"pp_size": 2}, {"pp_size": 2, "spread_vocabulary": True}, SPREAD)),
    ("phimoe", LAYERS, ({"ep_size": 2},)),
    slow("gpt2", LAYERS, ({"tp_size": 2}, {"pp_size": 2})),
    slow("mixtral", LAYERS, ({"ep_size": 2}, {"tp_size": 2, "pp_size": 2})),
]


@pytest.mark.parametrize(("family", "changes", "layouts"), DRAWN)
def test_random_weights_depend_on_no_layout_and_are_spread_as_the_models_own(
    family: str, changes: dict[str, Any], layouts: Any, cluster_of: Any, tmp_path: Path
) -> None:
    result = []
    for number, layout in enumerate(layouts):
        folder = str(tmp_path / str(number))
        job = {"folder": folder, "helix": layout, "family": family, "changes": changes}
        assert not any(cluster_of(ranks_of(layout)).run(draw, **job))
        result.append(stored(Path(folder)))
    cluster_of(2).run(draw, folder=str(tmp_path / "dp"), helix={}, family=family, changes=changes)
    expected = stored(tmp_path / "dp")
    for other in result:
        assert other.keys() == expected.keys()
        assert all(torch.equal(other[name], value) for name, value in expected.items())
    AutoModelForCausalLM.from_config(tiny(family, **changes).config).save_pretrained(tmp_path / "stock")
    stock = stored(tmp_path / "stock")
    assert stock.keys() == expected.keys()
    drawn = 0
    for name, value in stock.items():
        assert expected[name].shape == value.shape
        if value.float().std() < 1e-12:  # ones and zeros
            assert torch.equal(expected[name], value), name
            continue
        drawn += 1
        assert not torch.equal(expected[name], value)
        assert expected[name].std().item() == pytest.approx(value.std().item(), rel=0.25), name
        assert (expected[name] == 0).sum() == (value == 0).sum()  # the row of padding
    assert drawn > 10
    pairs = [(name, name.replace(".1.", ".2.", 1)) for name in expected if ".1." in name and stock[name].std() > 1e-12]
    assert len(pairs) >= 4
    assert not any(torch.equal(expected[one], expected[other]) for one, other in pairs), "layers differ"


def test_a_model_that_draws_from_outside_of_its_layers_is_refused() -> None:
    """Were it drawn layer by layer, it would start from other weights than its own."""
    from hf_helix.checkpoint.load import check_pieces, modules_drawn_apart

    model = outline("llama", {})
    pieces = modules_drawn_apart(model, model.model.layers)
    assert "model.layers.2" in pieces
    assert "lm_head" in pieces
    check_pieces(model, pieces)
    plain = model._init_weights

    def reaching(module: Any) -> None:
        plain(module)
        if module is model.model:
            torch.nn.init.normal_(module.layers[1].mlp.up_proj.weight)

    model._init_weights = reaching
    with pytest.raises(ValueError, match=r"draws model.layers.1.mlp.up_proj.weight from a module around the layers"):
        check_pieces(model, pieces)


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.timeout(900)
def test_a_rank_takes_its_share_and_one_tensor(axis: str, tmp_path: Path) -> None:
    """Of fresh processes, by the kernel's own peak: pages of mapped files count."""
    sizes = ["--layers", "8", "--hidden", "768", "--vocabulary", "16000", "--shards", "60MB", f"--{axis}", "4"]
    command = [sys.executable, "-m", "benchmarks.checkpoint", "load", *sizes, "--json", str(tmp_path / "found.json")]
    subprocess.run(command, check=True, timeout=870, cwd=ROOT)
    rows = {row["name"]: row for row in json.loads((tmp_path / "found.json").read_text())["results"]}
    costs = {way: [cost for (cost,) in row["ranks"]] for way, row in rows.items()}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(benchmark_llama(768, 8, 16000, max_position_embeddings=64))
    tensors, other = [parameter.nbytes for parameter in made.parameters()], 40e6
    for way in ("folder", "random"):
        assert sum(rows[way]["sizes"]) <= 1.01 * sum(tensors)
        for cost, held in zip(costs[way], rows[way]["sizes"], strict=True):
            assert cost["anonymous"] <= cost["resident"] + other
            assert cost["resident"] <= held + max(tensors) + other
    assert all(cost["resident"] <= 2 * max(tensors) + other for cost in costs["save"])
    assert all(cost["resident"] >= sum(tensors) for cost in costs["whole"]), "what it is measured against"
