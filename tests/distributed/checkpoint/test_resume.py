"""Checkpoints: a run goes on where it was, on the same layout bit for bit, on another within summation order."""

import functools
import json
import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.cluster import JobFailed, forking
from support.jobs import Stream
from support.marks import slow
from support.models import arguments, llama, sequences
from support.resume_jobs import make, run
from torch import nn
from transformers import Trainer

from hf_helix import HelixConfig, HelixTrainerMixin
from hf_helix.checkpoint import claims, files, manifest
from hf_helix.checkpoint.manifest import describe_parameters
from hf_helix.checkpoint.training_state import load_states, save_states
from hf_helix.integrations.trainer.checkpoints import RUNNING
from hf_helix.operators.parameters.parts import cut_tensor, views_of
from hf_helix.planning.parameters import TP, Cut, Parameter, Part, Place, Ranks, Sharers

# -- what the ranks run ------------------------------------------------------------------------------------------------


def described(folder: str, helix: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What a checkpoint would say of the parameters."""
    trainer = make(folder, helix, **options)
    helix = trainer.helix
    result = describe_parameters(helix.weights.parts(), helix.mesh)
    trainer.helix.close()
    return result


class Hub:
    """Instead of the Hub's client: what was uploaded, with the files as they were."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, Any]] = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return mock.Mock(repo_id=repo_id)

    def upload_folder(self, *, folder_path: str, commit_message: str, **options: Any) -> Future[None]:
        ignored = [pattern for pattern in options.get("ignore_patterns") or () if pattern != "_*"]
        assert all(pattern == "checkpoint-*" for pattern in ignored)
        paths = (path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file())
        names = [str(path) for path in paths if not (ignored and str(path).startswith(("_", "checkpoint-")))]
        self.uploads.append({"message": commit_message, "path": options.get("path_in_repo"), "files": sorted(names)})
        done: Future[None] = Future()
        done.set_result(None)
        return done


def push(folder: str, helix: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The uploads of a run, in order."""
    hub = Hub()
    training = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_model_id": "someone/model", "max_steps": 4}
    with mock.patch("transformers.trainer.hf_api", return_value=hub):
        trainer = make(folder, helix, training={**training, "save_steps": 2, "hub_always_push": True})
        trainer.train()
        trainer.save_model()
    return hub.uploads


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Contents of `trainer_state.json`."""
    return json.loads((checkpoint / "trainer_state.json").read_text())  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A norm with a parameter that has no dimension."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate = norm, nn.Parameter(torch.tensor(1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate * self.norm(x)


def with_gates(**changes: Any) -> Any:
    model = llama(**changes)
    for layer in model.model.layers:
        layer.input_layernorm = Gated(layer.input_layernorm)
    return model


# -- the tests --------------------------------------------------------------------------------------------------------

JOB = "support.resume_jobs:"
SHARDS = {"ZeRO-1": "shard_optimizer", "ZeRO-3": "shard_parameters"}


def options_of(layout: str, **training: Any) -> dict[str, Any]:
    """Options of a job on a layout such as "tp2 ZeRO-3": ranks that share a batch take as many micro-batches more."""
    sizes = {f"{word[:2]}_size": int(word[2:]) for word in layout.split() if word[:2] in ("tp", "pp", "cp", "ep")}
    shards: dict[str, Any] = {option: True for word, option in SHARDS.items() if word in layout}
    shards |= {"spread_vocabulary": True} if "slices" in layout else {}
    shards |= {"dp_replicate_size": 2} if "twice" in layout else {}
    steps = math.prod(size for name, size in sizes.items() if name != "ep_size")
    return {
        "helix": {"plan": "greedy", **sizes, **shards},
        "training": {"gradient_accumulation_steps": steps, **training},
    }


TP2 = options_of("tp2")["helix"]
SPREAD, KEPT = options_of("dp2 ZeRO-3"), options_of("dp2 ZeRO-1")


@pytest.fixture(scope="module")
def runs(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By its layout, a run over two ranks without interruption: its checkpoint after half of its steps, and results."""

    @functools.cache
    def run_on(layout: str) -> tuple[Path, list[Any]]:
        folder = tmp_path_factory.mktemp("whole")
        return folder / "checkpoint-2", cluster_of(2).run(f"{JOB}run", folder=str(folder), **options_of(layout))

    return run_on


def goes_on(result: dict[str, Any], expected: dict[str, Any], *, exactly: bool = False, rounding: float = 1e-5) -> None:
    """All steps are there, the first of them from the checkpoint; losses differ by `rounding`, or by nothing."""
    error = 0 if exactly else rounding
    assert result["losses"].keys() == expected["losses"].keys()
    assert result["rates"] == expected["rates"]
    assert result["tokens"] == expected["tokens"]
    assert result["flos"] == pytest.approx(expected["flos"], rel=1e-6)
    np.testing.assert_allclose(list(result["losses"].values()), list(expected["losses"].values()), rtol=0, atol=error)
    assert result["eval"] == pytest.approx(expected["eval"], abs=error)
    if exactly:
        assert result["weights"] == expected["weights"]


# -- going on ------------------------------------------------------------------------------------------------------


def test_the_run_itself_is_the_stock_trainers(runs: Any, tmp_path: Path) -> None:
    saved, ranks = runs("tp2")
    goes_on(ranks[0], {**run(str(tmp_path), None), "flos": ranks[0]["flos"]})
    own = ("log_history", "total_flos")
    mine, theirs = (
        {key: value for key, value in state_of(folder).items() if key not in own}
        for folder in (saved, tmp_path / "checkpoint-2")
    )
    assert mine == theirs


@pytest.mark.parametrize("layout", ["tp2", "dp2 ZeRO-1", "dp2 ZeRO-3"])
def test_the_same_layout_goes_on_bit_for_bit(layout: str, runs: Any, cluster_of: Any, tmp_path: Path) -> None:
    saved, expected = runs(layout)
    goes_on(expected[0], runs("tp2")[1][0])
    result = cluster_of(2).run(f"{JOB}run", folder=str(tmp_path), resume=str(saved), **options_of(layout))
    for mine, theirs in zip(result, expected, strict=True):
        goes_on(mine, theirs, exactly=True)
        assert mine["checkpoints"] == ["checkpoint-4"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2", "pp2 slices"),
        ("dp2 ZeRO-1", "dp2 ZeRO-3"),
        ("dp2 ZeRO-3", "tp2"),
        slow("pp2 slices", "tp2"),
        slow("tp2", "cp2"),
        slow("dp2 ZeRO-3", "dp2"),
    ],
)
def test_another_layout_goes_on(before: str, after: str, runs: Any, cluster_of: Any, tmp_path: Path) -> None:
    saved, expected = runs(before)
    for mine in cluster_of(2).run(f"{JOB}run", folder=str(tmp_path), resume=str(saved), **options_of(after)):
        goes_on(mine, expected[0])


@pytest.mark.parametrize(
    ("before", "after", "optim"),
    [("dp2 ZeRO-1", "dp2", "adagrad"), ("dp2 ZeRO-3", "dp2 ZeRO-1", "adamw_torch"), ("dp2", "dp2 ZeRO-3", "adagrad")],
)
def test_states_of_parameters_without_a_dimension(
    before: str, after: str, optim: str, cluster_of: Any, tmp_path: Path
) -> None:
    """They are shared out, saved and loaded as those of others; counts of steps are not."""
    model = {"family": f"{__name__}:with_gates"}

    def job(name: str, layout: str) -> dict[str, Any]:
        return {"folder": str(tmp_path / name), "model": model, **options_of(layout, optim=optim)}

    expected = cluster_of(2).run(f"{JOB}run", **job("whole", before))
    saved = str(tmp_path / "whole" / "checkpoint-2")
    for mine in cluster_of(2).run(f"{JOB}run", resume=saved, **job("rest", after)):
        goes_on(mine, expected[0])


LATER = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("helix", [SPREAD["helix"], KEPT["helix"]], ids=str)
def test_what_is_frozen_after_the_cut_is_not_trained(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Wherever a checkpoint is from."""
    job = {"folder": str(tmp_path), "freeze_later": (LATER,)}
    whole, spread = (cluster_of(2).run(described, helix=options, **job) for options in ({}, helix))
    assert spread == whole
    assert [name for name, about in spread[0].items() if not about["trained"]] == [LATER]


def test_one_process_goes_on(runs: Any, tmp_path: Path) -> None:
    saved, expected = runs("tp2")
    shutil.copytree(saved, tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-3").mkdir()  # of a save that was never complete
    goes_on(run(str(tmp_path), {"plan": "greedy"}, resume=True), expected[0])


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    expected = run(str(tmp_path), {"plan": "greedy"})
    before = (tmp_path / "checkpoint-4").stat().st_ino
    goes_on(run(str(tmp_path), {"plan": "greedy"}, resume=f"{tmp_path}/checkpoint-2"), expected, exactly=True)
    assert (
        expected["checkpoints"] == sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    )
    assert (tmp_path / "checkpoint-4").stat().st_ino != before
    assert manifest.Manifest.read(tmp_path / "checkpoint-4")


@pytest.mark.parametrize(("rows", "steps"), [(6, 1), slow(10, 2)])
def test_a_stream_that_is_read_again(rows: int, steps: int, tmp_path: Path) -> None:
    """It goes on in its second round; the stock Trainer would begin that round anew."""
    options = {
        "training": {"max_steps": 7, "save_steps": 5, "gradient_accumulation_steps": steps},
        "train_dataset": Stream(sequences(rows)),
    }
    expected = run(str(tmp_path), {"plan": "greedy"}, **options)
    resumed = run(str(tmp_path), {"plan": "greedy"}, resume=str(tmp_path / "checkpoint-5"), **options)
    goes_on(resumed, expected, exactly=True)


class Counting(Trainer):
    """Keeps a number of its own beside a checkpoint."""

    number = 0

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        Path(self.args.output_dir, "number").write_text("7")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.number = int(Path(checkpoint).parent.joinpath("number").read_text())


def test_what_a_class_behind_the_mixin_resumes(tmp_path: Path) -> None:
    """As TRL's GRPO does with adaptive entropy."""
    kind = type("CutCounting", (HelixTrainerMixin, Counting), {})
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1, "max_steps": 3}
    data = sequences(8)
    first, second = (
        kind(model=llama(), args=arguments(str(tmp_path), **options), train_dataset=data, helix_config=HelixConfig())
        for _ in range(2)
    )
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (first.number, second.number) == (0, 7)
    for name, weight in first.model.state_dict().items():
        assert weight.equal(second.model.state_dict()[name]), name


WAYS: dict[str, dict[str, Any]] = {
    "tied embeddings, fused projections": {"model": {"family": "gpt2"}},
    "frozen parameters": {"freeze": ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]},
    "adapters": {"model": {"lora": {"modules_to_save": ["norm"], "lora_dropout": 0.1, "idle": "other"}}},
    "in bf16": {"model": {"dtype": "bfloat16"}},
    "products in bf16": {"training": {"bf16": True}},
    "recomputed": {"training": {"gradient_checkpointing": True}},
    "order by length": {
        "training": {"train_sampling_strategy": "group_by_length", "max_steps": 6, "save_steps": 4},
        "data": {"lengths": (17, 5, 11, 8, 14), "padding": "right"},
    },
    "at the end of an epoch": {"training": {"max_steps": 6, "save_steps": 3}},
}


def test_a_stream_goes_on_as_it_would_have(cluster_of: Any, tmp_path: Path) -> None:
    """Ranks that share batches read it themselves; told otherwise, they say before the first step what is lost."""
    stock = run(str(tmp_path / "stock"), None, streamed=True)
    first = cluster_of(2).run(f"{JOB}run", folder=str(tmp_path), helix=TP2, streamed=True)[0]
    rest = cluster_of(2).run(
        f"{JOB}run",
        folder=str(tmp_path / "rest"),
        resume=f"{tmp_path}/checkpoint-2",
        helix={"pp_size": 2},
        streamed=True,
    )[0]
    for losses in (first["losses"], {**first["losses"], **rest["losses"]}):
        assert losses == pytest.approx(stock["losses"], abs=1e-5)
    told = {"accelerator_config": {"dispatch_batches": True}}
    with pytest.raises(JobFailed, match="'dispatch_batches': False"):
        cluster_of(2).run(f"{JOB}run", folder=str(tmp_path / "told"), helix=TP2, streamed=True, training=told)


@pytest.mark.parametrize(
    ("way", "layout"),
    [
        ("adapters", "tp2"),
        slow("adapters", "dp2 ZeRO-3"),
        slow("tied embeddings, fused projections", "dp2 ZeRO-1"),
        slow("frozen parameters", "dp2 ZeRO-3"),
        slow("in bf16", "dp2 ZeRO-3"),
        slow("products in bf16", "dp2 ZeRO-1"),
        slow("recomputed", "tp2"),
        slow("order by length", "tp2"),
        slow("at the end of an epoch", "tp2"),
    ],
)
def test_ways_to_train_go_on_bit_for_bit(way: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    options = {"training": {}, "helix": options_of(layout)["helix"], **WAYS[way]}
    steps = options["training"].get("save_steps", 2)
    whole, rest = str(tmp_path / "whole"), str(tmp_path / "rest")
    expected = cluster_of(2).run(f"{JOB}run", folder=whole, **options)
    result = cluster_of(2).run(f"{JOB}run", folder=rest, resume=f"{whole}/checkpoint-{steps}", **options)
    for mine, theirs in zip(result, expected, strict=True):
        goes_on(mine, theirs, exactly=True)


EXPERTS = {"model": {"family": "mixtral", "num_key_value_heads": 4}}
FUSED = {"model": {"family": "gpt2"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2 to dp4": {},
    "cp2 pp2 to tp2 dp2": {},
    "dp4 ZeRO-1 to tp2 ZeRO-1": {},
    "tp2 ZeRO-1 to dp4 ZeRO-3": {},
    "dp4 ZeRO-3 twice to tp2 ZeRO-1": {},
    "tp4 to pp2 dp2": FUSED,
    "ep2 tp2 to ep4": EXPERTS,
    "ep2 ZeRO-3 to pp2 ZeRO-3": EXPERTS,
    "dp4 ZeRO-1 to tp2 ZeRO-3, adapters": {"model": {"lora": {}}},
    "ep2 tp2 to pp2 ZeRO-3, adapters": {"model": {"family": "mixtral", "num_key_value_heads": 4, "lora": {}}},
    "pp2 dp2 to pp4, adafactor": {"training": {"optim": "adafactor"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_four_ranks_change_their_layout(case: str, cluster_of: Any, tmp_path: Path) -> None:
    before, after = case.partition(",")[0].split(" to ")
    model = {"num_hidden_layers": 8, **LAYOUTS[case].get("model", {})}

    def job(name: str, layout: str) -> dict[str, Any]:
        options = options_of(layout, per_device_train_batch_size=1, **LAYOUTS[case].get("training", {}))
        return {"folder": str(tmp_path / name), "model": model, **options}

    expected = cluster_of(4).run(f"{JOB}run", **job("whole", before))
    saved = str(tmp_path / "whole" / "checkpoint-2")
    for mine in cluster_of(4).run(f"{JOB}run", resume=saved, **job("rest", after)):
        goes_on(mine, expected[0])
    again = cluster_of(4).run(f"{JOB}run", resume=saved, **job("same", before))
    for mine, theirs in zip(again, expected, strict=True):
        goes_on(mine, theirs, exactly=True)


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "blocks"), [(0, ()), (1, ()), (2, ()), (1, (3, 2)), (0, (4, 2)), (None, ())])
@pytest.mark.parametrize("over", [2, 5, 97])
def test_pieces_of_stretches_fill_the_whole_once(dim: int | None, blocks: tuple[int, ...], over: int) -> None:
    """A slice that is spread over ranks: each has some elements in a row, perhaps none."""
    whole = torch.arange(6 * 5 * 4).view(6, 5, 4)
    cut = Cut(dim=dim, length=0 if dim is None else whole.shape[dim], blocks=blocks)
    filled = torch.zeros_like(whole)
    for rank in range(2):
        elements = cut_tensor(whole, cut, 2, rank).reshape(-1)
        stretch = -(-len(elements) // over)
        for start in range(0, over * stretch, stretch):
            mine = elements[start : start + stretch]
            held = held_by(rank, 2, cut, tuple(whole.shape))
            first = min(start, len(elements))
            part = Stretch(held.row, held.place, (first, first + len(mine)))
            pieces = views_of(part, mine)
            assert sum(piece.numel() for piece in pieces.values()) == len(mine)
            for offset, piece in pieces.items():
                place = tuple(slice(first, first + length) for first, length in zip(offset, piece.shape, strict=True))
                assert torch.equal(piece, whole[place])
                assert piece.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr(), "a view"
                filled[place] += part.counts
    assert (filled == 1).all()


@dataclass(frozen=True)
class Stretch(Part):
    """Some elements in a row of a slice."""

    stretch: tuple[int, int] = (0, 0)

    @property
    def elements(self) -> tuple[int, int]:
        return self.stretch


def held_by(rank: int, size: int, cut: Cut, shape: tuple[int, ...]) -> Part:
    return Part(Parameter("weight", shape, cut=cut), Place({TP: Sharers(Ranks(size, rank))}))


def with_row_sums(rows: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """An optimizer with a state that is not of its parameter's shape."""
    weight = torch.nn.Parameter(torch.zeros(rows, 2))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight]["sums"] = torch.arange(float(rows), dtype=torch.float64)
    return weight, optimizer


def test_states_that_cannot_be_cut(tmp_path: Path) -> None:
    weight, optimizer = with_row_sums(4)
    cut = Cut(dim=0, length=4)
    save_states(optimizer, {weight: held_by(0, 1, cut, (4, 2))}, tmp_path)
    sums = optimizer.state[weight]["sums"].clone()
    optimizer.state[weight]["sums"] = torch.zeros(1)
    load_states(optimizer, {weight: held_by(0, 1, cut, (4, 2))}, tmp_path)
    assert torch.equal(optimizer.state[weight]["sums"], sums)  # its own type, too
    half, other = with_row_sums(2)
    words = r"state 'sums' of weight has the shape \[4\].*\[4, 2\].*another tp_size.*shard_optimizer.*shard_parameters"
    with pytest.raises(ValueError, match=words):
        load_states(other, {half: held_by(0, 2, cut, (4, 2))}, tmp_path)
    assert other.state[half]["sums"].shape == (2,)


# -- what stays, what is best, what is uploaded --------------------------------------------------------------------

BEST = {
    "max_steps": 3,
    "learning_rate": 0.05,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}


@pytest.mark.parametrize("helix", [TP2, slow(SPREAD["helix"])], ids=str)
def test_the_best_model_at_the_end(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    expected = run(str(tmp_path / "stock"), None, training=BEST)
    assert expected["best"] != "checkpoint-3"  # or loading it would change nothing
    training = {**BEST, "gradient_accumulation_steps": 2 if helix is TP2 else 1}
    for result in cluster_of(2).run(f"{JOB}run", folder=str(tmp_path / "helix"), helix=helix, training=training):
        assert result["best"] == expected["best"]
        assert result["checkpoints"] == expected["checkpoints"]
        assert result["eval"] == pytest.approx(expected["eval"], abs=1e-5)
    last = state_of(tmp_path / "helix" / "checkpoint-3")
    assert last["best_model_checkpoint"] == str(tmp_path / "helix" / result["best"])


def others(files: list[str]) -> list[str]:
    """Without the weights, which lie in more files."""
    return [name for name in files if not name.startswith("model")]


def test_uploads_are_the_stock_trainers(tmp_path: Path) -> None:
    expected = push(str(tmp_path / "stock"), None)
    result = push(str(tmp_path / "helix"), {"plan": "greedy"})
    assert [(upload["message"], upload["path"]) for upload in result] == [
        (upload["message"], upload["path"]) for upload in expected
    ]
    for mine, theirs in zip(result, expected, strict=True):
        if mine["path"] is None:
            assert others(mine["files"]) == others(theirs["files"])
            assert "model.safetensors" in mine["files"]
        else:
            assert {"helix_state.json", "optimizer/.metadata", "trainer_state.json"} <= set(mine["files"])


# -- what cannot be used -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint by one process."""
    folder = tmp_path_factory.mktemp("saved")
    run(str(folder), {"plan": "greedy"}, training={"max_steps": 1, "save_steps": 1})
    return folder / "checkpoint-1"


def cut_short(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = next(folder.glob(name))
        path.write_bytes(path.read_bytes()[:-10])

    return spoil


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(name)).unlink()


def of_the_model_only(folder: Path) -> None:
    path = folder / manifest.NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "optimizer": None}))


def of_a_later_format(folder: Path) -> None:
    path = folder / manifest.NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


Case = tuple[Callable[[Path], Any], dict[str, Any], str]
UNFIT: dict[str, Case] = {
    "no weights": (without("model.safetensors"), {}, r"damaged: model\.safetensors is missing"),
    "weights cut short": (cut_short("model.safetensors"), {}, r"model\.safetensors has \d+ bytes instead of \d+"),
    "states cut short": (cut_short("optimizer/*.distcp"), {}, r"distcp has \d+ bytes instead of \d+"),
    "states without a table": (without("optimizer/.metadata"), {}, r"optimizer/\.metadata is missing"),
    "no generators": (without("helix_rng_0.pt"), {}, r"helix_rng_0\.pt is missing"),
    "not complete": (without(manifest.NAME), {}, r"no helix_state\.json: .* not completely.*from_pretrained"),
    "not there": (lambda folder: shutil.rmtree(folder), {}, "is not a folder; give one"),
    "the model only": (of_the_model_only, {}, "save_only_model=True.*from_pretrained"),
    "a later format": (of_a_later_format, {}, "has format 99.* reads format 1"),
    "another size": (
        lambda _: None,
        {"model": {"intermediate_size": 60}},
        r"another model.*mlp\.gate_proj\.weight has shape \[57, 32\], here \[60, 32\].* and \d+ more",
    ),
    "another model": (lambda _: None, {"model": {"family": "gpt2"}}, r"a LlamaForCausalLM \(.*a GPT2LMHeadModel\)"),
    "another type": (
        lambda _: None,
        {"model": {"dtype": "bfloat16"}},
        "embed_tokens.weight has dtype float32, here bfloat16",
    ),
    "other parameters": (
        lambda _: None,
        {"freeze": ["model.norm.weight"]},
        r"model\.norm\.weight has trained True, here False",
    ),
    "another optimizer": (lambda _: None, {"training": {"optim": "sgd"}}, "optimizer AdamW.* uses SGD.* same `optim`"),
    "other groups": (
        lambda _: None,
        {"training": {"weight_decay": 0.0}, "regroup": True},
        r"another set of parameters: .* has group 0, here 1",
    ),
    "other samples": (
        lambda _: None,
        {"training": {"gradient_accumulation_steps": 3}},
        r"took 4 \(per_device_train_batch_size 2 x gradient_accumulation_steps 2 x .* 1\) samples, and would take 6",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_resumed(case: str, saved: Path, tmp_path: Path) -> None:
    spoil, options, words = UNFIT[case]
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(saved, folder)
    spoil(folder)
    before = contents(tmp_path)
    options = dict(options)
    regroup = options.pop("regroup", False)
    trainer = make(str(tmp_path), {"plan": "greedy"}, **options)
    if regroup:
        trainer.get_decay_parameter_names = lambda model: []
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ValueError, match=words):
        trainer.train(resume_from_checkpoint=str(folder))
    assert contents(tmp_path) == before
    if case not in ("another optimizer", "other groups"):  # seen only when the optimizer is there
        assert all(torch.equal(*pair) for pair in zip(trainer.model.parameters(), weights, strict=True))


def test_every_rank_refuses(saved: Path, cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": TP2, "resume": str(saved), "model": {"intermediate_size": 60}}
    cluster_of(2).assert_raises(f"{JOB}run", "saved from another model", **job)


def test_nothing_to_resume(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match=r"No valid checkpoint found.*resume_from_checkpoint=None"):
        run(str(tmp_path), {}, resume=True)


def test_other_samples_with_ignore_data_skip(saved: Path, tmp_path: Path) -> None:
    training = {"gradient_accumulation_steps": 3, "ignore_data_skip": True, "max_steps": 3}
    result = run(str(tmp_path), {"plan": "greedy"}, resume=str(saved), training=training)
    assert list(result["losses"]) == [1, 2, 3]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- folders that cannot be written --------------------------------------------------------------------------------


def test_a_file_in_the_place_of_the_folder(cluster_of: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    job = {"folder": str(tmp_path / "out"), "helix": TP2}
    cluster_of(2).assert_raises(f"{JOB}run", "cannot be made", "give another", **job)
    assert (tmp_path / "out").read_text() == "mine"


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(str(tmp_path), {"plan": "greedy"})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(ValueError, match=r"0\.000 GB of room, and a checkpoint needs .* GB or more"):
        trainer.train()
    assert list(tmp_path.iterdir()) == []


def test_hosts_that_do_not_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(str(tmp_path), {"plan": "greedy"})
    monkeypatch.setattr("hf_helix.integrations.trainer.saving._probe", lambda *_: tmp_path / "on another host")
    words = "not the folder that rank 0 has written to: give a folder that all hosts share; or save_only_model=True"
    with pytest.raises(ValueError, match=f"{words}.* or save_strategy='no'.*load_best_model_at_end=False"):
        trainer.train()
    assert list(tmp_path.iterdir()) == []


# -- two runs in one folder ----------------------------------------------------------------------------------------


def hold(folder: str, held: Any) -> None:
    """Another run that saves, as long as its process lives."""
    claims.take_claim(Path(folder, RUNNING))
    held.set()
    time.sleep(600)


def test_two_runs_with_one_output_dir(tmp_path: Path) -> None:
    """The second one is refused, until the first is gone, however it ends; evaluation is not."""
    held = forking().Event()
    other = forking().Process(target=hold, args=(str(tmp_path), held), daemon=True)
    other.start()
    assert held.wait(60)
    job = {"training": {"max_steps": 1, "save_steps": 1}}
    trainer = make(str(tmp_path), {"plan": "greedy"}, **job)
    words = rf"output_dir='{tmp_path}' is in use by another run, process {other.pid} on .* another output_dir.*-2'"
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert "eval_loss" in trainer.evaluate()
    assert [path.name for path in tmp_path.iterdir()] == [RUNNING]
    other.kill()
    other.join()
    with trainer._claimed_output_dir():  # as a callback that trains another trainer of the same process
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


# -- what is not ours ------------------------------------------------------------------------------------------------


def test_a_save_deletes_nothing_of_others(tmp_path: Path) -> None:
    """Neither folders that look like ours, nor what links lead to."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    mine = [out / "_saving" / "notes", out / "_saving-a" / "notes", out / ".helix-b" / "notes", elsewhere / "notes"]
    orphan = out / "model-00001-of-00002.safetensors"
    for path in (*mine, orphan):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (elsewhere / claims.MARK).write_text(f"{claims._TITLE}process 1")
    for name in (".helix-link", "_saving-link"):
        (out / name).symlink_to(elsewhere, target_is_directory=True)
    left = claims.make_unfinished(out, files.STAGING)
    claims._held.pop(claims._key(left / claims.MARK))  # of a process that is gone
    trainer = make(str(out), {"plan": "greedy"}, training={"max_steps": 1, "save_steps": 1})
    trainer.train()
    trainer.save_model()
    assert [path.read_text() for path in (*mine, orphan)] == ["mine"] * 5
    assert (elsewhere / claims.MARK).exists()
    assert not left.exists()


def test_a_link_in_the_place_of_a_mark(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "mark").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link"):
        claims.take_claim(tmp_path / "mark")
    assert (tmp_path / "mine").read_text() == "mine"


# -- whole or not there --------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("replaces", [False, True])
def test_killed_while_it_takes_its_place(
    number: int, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it happens, a complete checkpoint is found under its name, the new one or the one it would replace."""

    def complete(folder: Path) -> bool:
        return (folder / "mark").exists()

    def checkpoint(folder: Path, text: str) -> Path:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(text)
        return folder

    if replaces:
        (checkpoint(tmp_path / "checkpoint-3", "old") / "mark").touch()
    staging = claims.make_unfinished(tmp_path, files.STAGING)
    new = checkpoint(staging / "checkpoint-3", "new")
    calls = iter(range(100))

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        mark = dying((new / "mark").touch)
        was_killed = False
        try:
            files.publish(new, tmp_path, mark)
        except Killed:
            was_killed = True
    assert was_killed == (number < 3 + replaces)
    if was_killed:
        claims._held.pop(claims._key(staging / claims.MARK))  # as in the next process
    files.recover(tmp_path, complete)
    assert not staging.exists()
    if number == 0 and not replaces:
        assert list(tmp_path.iterdir()) == []
    else:
        assert (tmp_path / "checkpoint-3" / "weights").read_text() == ("old" if number < 1 + replaces else "new")
        assert complete(tmp_path / "checkpoint-3")
