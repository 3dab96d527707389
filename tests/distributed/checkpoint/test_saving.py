"""A checkpoint is, byte for byte, what `save_pretrained` of the whole model writes, and every rank writes its part."""

import contextlib
import copy
import errno
import filecmp
import functools
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.derived_models import HOME
from support.jobs import build
from support.loop_jobs import said
from support.marks import slow
from support.models import arguments, tiny, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.checkpoint.direct import DirectFile
from hf_helix.checkpoint.files import FileLayout, staged, write_box
from hf_helix.measure.memory import LiveBytes
from hf_helix.operators.parameters.parts import cut_tensor, views_of
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.planning.parameters import TP, Cut, Parameter, Part, Place, Ranks, Sharers
from hf_helix.runtime.divided import plain_parameters

# What the ranks run


@plain_parameters()
def save(folder: str, cases: dict[str, dict[str, Any]], apart: bool = False) -> dict[str, dict[str, int]]:
    """Save models that nobody has trained; of each, the bytes that this rank has written and the peak of its tensors.

    Args:
        cases: by folder: the model's `family` and `changes`, the layout `helix`, and `size`, that of a file.
        apart: the folder of each rank is another one of the same name, as on hosts that share none.
    """
    result = {}
    with own_folder(folder, apart):
        for name, case in cases.items():
            model = tiny(case["family"], **case.get("changes", {}))
            trainer = HelixTrainer(model=model, args=arguments(name), helix_config=HelixConfig(**case["helix"]))
            flats = trainer.helix.runner.rank_units.flat_parameters
            held = [*(flat.shard for flat in flats), *(flat.buffer for flat in zero1_flat_parameters(flats))]
            counter = LiveBytes([*model.parameters(), *held])
            with counted() as written, counter:
                trainer.helix.save_pretrained(name, case.get("size"))
            result[name] = {"written": sum(written), "peak": counter.peak}
            trainer.helix.close()
    return result


@contextlib.contextmanager
def own_folder(folder: str, apart: bool) -> Iterator[None]:
    before, mine = os.getcwd(), Path(folder, str(dist.get_rank()) if apart else "")
    mine.mkdir(exist_ok=True)
    os.chdir(mine)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of what is written."""
    sizes: list[int] = []
    write = DirectFile.write_at

    def counting(file: DirectFile, data: Any, place: int) -> None:
        sizes.append(data.nbytes)
        write(file, data, place)

    with mock.patch.object(DirectFile, "write_at", counting):
        yield sizes


def run_out_of_room(folder: str, victim: int) -> None:
    """Save twice; the second time the disk is full on one rank, when it writes its third slice."""
    trainer = HelixTrainer(model=tiny(), args=arguments(folder), helix_config=HelixConfig(tp_size=2))
    trainer.save_model()
    write, calls = DirectFile.write_at, iter(range(10**9))

    def full(*given: Any) -> None:
        if dist.get_rank() == victim and next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given)

    with mock.patch.object(DirectFile, "write_at", full):
        trainer.save_model()


class Asking(TrainerCallback):
    """Asks the model, what is inside it and a copy to save themselves after a step; with `alone`, rank 0 reads it."""

    def __init__(self, folder: str, alone: bool) -> None:
        self.folder, self.alone = folder, alone
        self.said: dict[str, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        asked = {"model": model, "inside": model.base_model, "copy": copy.deepcopy(model)}
        for name, asking in asked.items():
            self.said |= {f"{name}.{what}": said(call) for what, call in calls(asking, self.folder).items()}
        if self.alone and state.is_world_process_zero:
            torch.save(model.state_dict(), io.BytesIO())


def calls(model: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """What would write the same files on every rank."""
    return {
        "save_pretrained": lambda: model.save_pretrained(folder),
        "push_to_hub": lambda: model.push_to_hub("me/model"),
        "torch.save": lambda: torch.save(model, io.BytesIO()),
    }


def ask(folder: str, helix: dict[str, Any], lora: bool, alone: bool = False) -> dict[str, str]:
    """What a callback is told; the run goes on and saves."""
    model = tiny(lora={} if lora else None, num_hidden_layers=4)
    training = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    rows = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)} for _ in range(8)]
    asking = Asking(f"{folder}/asked", alone)
    helix = {"plan": "sequential", **helix}
    build(folder, helix, training, model=model, train_dataset=rows, callbacks=[asking]).train()
    return asking.said


# Tests

SMALL = "20KB"
TOLD = 5000  # bytes of what ranks tell each other; the smallest model has 136960, its largest tensor 16768
CASES: dict[str, dict[str, Any]] = {
    "rows and columns": {"family": "llama", "helix": {"tp_size": 2}, "size": SMALL},
    "a single file": {"family": "llama", "helix": {"tp_size": 2}, "changes": {"tie_word_embeddings": True}},
    "fused, transposed": {"family": "gpt2", "helix": {"tp_size": 2}, "size": SMALL},
    "fused, of unequal widths": {"family": f"{HOME}phi3", "helix": {"tp_size": 2}, "size": SMALL},
    "pipeline": {"family": "llama", "helix": {"pp_size": 2}, "changes": {"num_hidden_layers": 4}, "size": SMALL},
    "experts": {"family": "phimoe", "helix": {"tp_size": 2}, "size": SMALL},
    "experts over dp": {"family": "phimoe", "helix": {"ep_size": 2}, "size": SMALL},
    "copies": {"family": "llama", "helix": {"plan": "sequential"}, "size": SMALL},
    "spread": {
        "family": "llama",
        "helix": {"shard_parameters": True},
        "changes": {"num_hidden_layers": 8},
        "size": SMALL,
    },
    "kept whole": {
        "family": "llama",
        "helix": {"shard_optimizer": True},
        "changes": {"num_hidden_layers": 8},
        "size": SMALL,
    },
}


def assert_stock(folder: Path, case: dict[str, Any], stock: Path) -> int:
    """The weights in a folder are those that Transformers writes; their bytes."""
    size = {"max_shard_size": case["size"]} if "size" in case else {}
    tiny(case["family"], **case.get("changes", {})).save_pretrained(stock, **size)
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in stock.iterdir()}
    weights = sorted(names - {"config.json"})
    assert len([name for name in weights if name.endswith(".safetensors")]) == 1 or "size" in case
    assert filecmp.cmpfiles(folder, stock, weights, shallow=False)[0] == weights
    return sum((stock / name).stat().st_size for name in weights if name.endswith(".safetensors"))


MORE = ("rows and columns", "a single file", "fused, of unequal widths", "experts", "copies")
NAMES = [slow(name, when=name in MORE) for name in CASES]


@pytest.fixture(scope="module")
def written(cluster_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """By case, the folder of it and others that were saved with it, and what each rank has written."""
    folder = tmp_path_factory.mktemp("shared")

    @functools.cache
    def save_some(more: bool) -> list[Any]:
        cases = {name: case for name, case in CASES.items() if (name in MORE) == more}
        return cluster_of(2).run(save, folder=str(folder), cases=cases)

    return lambda name: (folder, save_some(name in MORE))


def largest(case: dict[str, Any]) -> int:
    """Bytes of the largest tensor of the model."""
    return max(tensor.nbytes for tensor in tiny(case["family"], **case.get("changes", {})).parameters())


@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_of_transformers(name: str, written: Any, tmp_path: Path) -> None:
    """The same names, index, tensors in each file and bytes; and each rank has written about half of them, and gathered
    nothing: tensors that a save makes are none, but where experts lie otherwise on disk one slice of one layer's."""
    folder, ranks = written(name)
    size = assert_stock(folder / name, CASES[name], tmp_path / "stock")
    shares = [result[name]["written"] for result in ranks]
    tensors = sum(
        tensor.nbytes for path in (folder / name).glob("*.safetensors") for tensor in load_file(path).values()
    )
    assert sum(shares) == tensors < size
    assert min(shares) > 0.3 * tensors
    converted = largest(CASES[name]) // 2 if "experts" in name else 0
    assert all(result[name]["peak"] <= converted + TOLD for result in ranks)


def test_a_folder_has_all_that_the_stock_trainer_writes(cluster_of: Any, tmp_path: Path) -> None:
    """An older save is replaced, which was of more files; all else in the folder stays."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    tiny(num_hidden_layers=4, vocab_size=50).save_pretrained(ours, max_shard_size=SMALL)
    assert len(list(ours.glob("*.safetensors"))) > 6
    mine = {"notes.txt", "model_ema.safetensors"}  # nothing that Transformers would have written
    for name in mine:
        (ours / name).write_text("mine")
    job = {"helix": {"tp_size": 2}, "processing_class": word_tokenizer()}
    cluster_of(2).run("save_untrained", folder=str(ours), **job)
    Trainer(model=tiny(), args=arguments(str(theirs)), processing_class=word_tokenizer()).save_model()
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} | mine
    assert {(ours / name).read_text() for name in mine} == {"mine"}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert AutoTokenizer.from_pretrained(ours).get_vocab() == {"[PAD]": 0, "a": 1}
    args = torch.load(ours / "training_args.bin", weights_only=False)
    assert isinstance(args, TrainingArguments)
    assert args.learning_rate == 1e-3


def test_hosts_that_share_no_folder(cluster_of: Any, tmp_path: Path) -> None:
    """Everything lands in rank 0's; it holds one slice at a time, and takes what it has itself from itself."""
    cases = {name: CASES[name] for name in ("experts", "copies", "spread")}
    writing, other = cluster_of(2).run(save, folder=str(tmp_path), cases=cases, apart=True)
    for name, case in cases.items():
        assert_stock(tmp_path / "0" / name, case, tmp_path / name)
        assert other[name]["written"] == 0
        assert writing[name]["peak"] <= largest(case) + TOLD
    assert writing["copies"]["peak"] <= TOLD
    assert not list((tmp_path / "1").rglob("*.safetensors"))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_is_an_error_on_every_rank(victim: int, cluster_of: Any, tmp_path: Path) -> None:
    """The earlier save stays as it was, and nothing is left of the new one."""
    failures = cluster_of(2).errors(run_out_of_room, folder=str(tmp_path), victim=victim)
    assert "No space left on device" in failures[victim].trace
    assert f"on rank {victim}: OSError: [Errno 28] No space left on device" in failures[1 - victim].trace
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in tiny().state_dict().items())
    assert not list(tmp_path.glob(".helix-*"))


# -- what a cut model is asked for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("helix", "lora"), [slow({"tp_size": 2}, False), ({"pp_size": 2}, True)], ids=str)
def test_a_cut_model_does_not_save_itself(helix: dict[str, Any], lora: bool, cluster_of: Any, tmp_path: Path) -> None:
    told, _ = cluster_of(2).run(ask, folder=str(tmp_path), helix=helix, lora=lora)
    assert len(told) == 3 * len(calls(None, ""))
    for name, words in told.items():
        assert "cut over several ranks" in words, name
        assert "call trainer.save_model(folder) on every rank" in words, name
        assert "from_pretrained(folder)" in words, name
    assert not (tmp_path / "asked").exists()
    saved = tmp_path / "checkpoint-1"
    base = tiny(num_hidden_layers=4)
    model = PeftModel.from_pretrained(base, saved) if lora else AutoModelForCausalLM.from_pretrained(saved)
    assert isinstance(model, PeftModel if lora else PreTrainedModel)


@pytest.mark.parametrize(
    "helix",
    [slow({"pp_size": 2}), {"shard_parameters": True}],
    ids=str,
)
def test_what_one_rank_reads_alone_is_named(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    said = "on rank 0 while training goes on after on_step_end on rank 1: every rank must do so"
    job = {"folder": str(tmp_path), "helix": helix, "lora": False, "alone": True}
    cluster_of(2).assert_raises(ask, "model.embed_tokens.weight is read", said, raises="RuntimeError", **job)


def test_a_model_that_is_not_cut_gives_everything(tmp_path: Path) -> None:
    trainer = HelixTrainer(model=tiny(), args=arguments(str(tmp_path)), helix_config=HelixConfig())
    trainer.model.load_state_dict(trainer.model.state_dict())
    trainer.model.save_pretrained(tmp_path)
    assert trainer.model.state_dict().keys() == tiny().state_dict().keys()
    assert_stock(tmp_path, {"family": "llama"}, tmp_path.with_name("stock"))


# -- the files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "blocks"), [(None, ()), (0, ()), (0, (1, 1, 1)), (1, ()), (1, (1, 1)), (1, (5, 1)), (2, ())]
)
def test_slices_make_the_file(dim: int | None, blocks: tuple[int, ...], tmp_path: Path) -> None:
    """Of several types and shapes, written by three in any order: what `save_file` writes.

    Args:
        blocks: by their shares of a dimension.
    """
    tensors = {
        "b": torch.randn(6, 12, 9),
        "a": torch.randn(12, 12, 6).to(torch.bfloat16),
        "é": torch.arange(3 * 6 * 3).view(3, 6, 3),
    }
    alone = {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "mask": torch.tensor([True, False])}
    layout = FileLayout.of({name: tensor.to("meta") for name, tensor in (tensors | alone).items()})
    layout.create(tmp_path / "ours")
    with DirectFile(tmp_path / "ours") as file:
        for name, tensor in alone.items():
            write_box(file, layout.starts[name], tensor.shape, (0,) * tensor.dim(), tensor)
        for rank in (2, 0, 1):
            for name, tensor in tensors.items():
                length = 0 if dim is None else tensor.shape[dim]
                parts = tuple(share * length // sum(blocks) for share in blocks)
                row = Parameter(name, tuple(tensor.shape), cut=Cut(dim, length, blocks=parts))
                part = Part(row, Place({TP: Sharers(Ranks(3, rank))}))
                for offset, box in views_of(part, cut_tensor(tensor, row.cut, 3, rank)).items():
                    write_box(file, layout.starts[name], tensor.shape, offset, box)
    save_file(tensors | alone, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize(("written", "left"), [("adapter_model.safetensors", True), ("model.safetensors", False)])
def test_staged_files_take_the_place_of_their_own_kind(written: str, left: bool, tmp_path: Path) -> None:
    """Adapters may be saved to the folder of their model, whose files stay; files that no index names always do."""
    old, other = (tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    for path in (old, other):
        path.write_bytes(b"old")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": old.name, "b": "../notes"}}))
    with staged(tmp_path) as aside:
        (aside / written).write_bytes(b"new")
        assert old.exists()
    assert (tmp_path / written).read_bytes() == b"new"
    assert old.exists() == left
    assert other.exists()
    assert not list(tmp_path.glob(".helix-*"))
