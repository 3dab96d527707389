"""Full tensors of a cut model: names and bits of `save_pretrained` after PEFT's merge, at the cost of a tensor."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.marks import slow
from support.models import arguments, tiny

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.checkpoint.full_tensors import FullTensors
from hf_helix.measure.memory import LiveBytes
from hf_helix.runtime.divided import elements_of, plain_parameters
from hf_helix.runtime.division import Division

KEPT = {"target_modules": ["q_proj", "v_proj", "down_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}
ROUTERS = {"target_modules": "all-linear", "target_parameters": ["gate.weight"]}
BIASES = {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "idle": "other"}
BF16, TIED = {"dtype": "bfloat16"}, {"tie_word_embeddings": True}
TP, PP, CP, EP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}, {"ep_size": 2}
SHARDS, ZERO1 = {"shard_parameters": True}, {"shard_optimizer": True}
SLACK = 4096  # bytes of adapters and of single numbers
READS = 3  # of which one must keep to the memory: a thread of the process group may let go of a tensor late


def full_of(folder: str, helix: dict[str, Any], model: dict[str, Any], reader: int | None) -> dict[str, torch.Tensor]:
    """The tensors on this rank; the cut model is the same before and afterwards."""
    trainer = HelixTrainer(
        model=tiny(num_hidden_layers=5, **model), args=arguments(folder), helix_config=HelixConfig(**helix)
    )
    before = [elements_of(value) for value in trainer.model.parameters()]
    before = [value if value is None else value.clone() for value in before]
    tensors = FullTensors(trainer.helix.base, reader)
    read = {name: value.clone() for name, value in tensors.read(tensors.pieces)}
    about = {name: (dtype, shape) for name, dtype, shape in tensors.about(tensors.pieces)}
    assert list(read) == list(about) or not read
    assert all(about[name] == (value.dtype, value.shape) for name, value in read.items())
    for value, parameter in zip(before, trainer.model.parameters(), strict=True):
        assert value is None or torch.equal(value, elements_of(parameter))
    trainer.helix.close()
    return read


@pytest.mark.parametrize(
    ("helix", "model"),
    [
        (TP, {"lora": KEPT}),
        (EP, {"family": "mixtral", "lora": ROUTERS}),
        (PP, {**BF16, **TIED, "lora": {}}),
        slow(TP, {"family": "qwen2", **BF16, "lora": BIASES}),
        slow(TP, {"family": "gpt2", "lora": {"target_modules": ["c_attn", "wte"], "use_dora": True}}),
        slow(TP, {"family": "qwen2", **BF16, "lora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True}}),
        slow(TP, {"family": "gpt2", "lora": {"target_modules": ["c_attn", "c_proj", "wte"]}}),
        slow(TP, {"family": "mixtral", **BF16, "lora": ROUTERS}),
        slow(
            PP,
            {"family": "phimoe", "lora": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}},
        ),
        slow(EP, {"family": "qwen3_moe"}),
        slow(CP, {"lora": KEPT}),
        slow(SHARDS, {"lora": KEPT}),
        slow(SHARDS, {"family": "qwen3_moe", "lora": ROUTERS}),
        slow({**SHARDS, "offload": "parameters"}, {}),
        slow(ZERO1, {**TIED}),
    ],
    ids=str,
)
def test_names_and_bits_of_the_uncut_model(
    helix: dict[str, Any], model: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    whole = tiny(num_hidden_layers=5, **model)
    whole = whole.merge_and_unload() if "lora" in model else whole
    whole.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    for reader in (0, None):
        first, second = cluster_of(2).run(full_of, folder=str(tmp_path), helix=helix, model=model, reader=reader)
        for read in (first, second) if reader is None else (first,):
            assert read.keys() == wanted.keys()
            assert [name for name, value in wanted.items() if not torch.equal(read[name], value)] == []
        assert reader is None or not second


def cost(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Peaks of memory, and the order of gathers and uses, with a caller that keeps no tensor."""
    trainer = HelixTrainer(
        model=tiny(num_hidden_layers=5, **model), args=arguments(folder), helix_config=HelixConfig(**helix)
    )
    tensors, events, peaks = FullTensors(trainer.helix.base, 0), [], []
    start = Division.start_gather

    def noted(division: Division, *given: Any) -> Any:
        events.append(f"gather {division.name}")
        finish = start(division, *given)
        return lambda: (finish(), events.append(f"have {division.name}"))[0]

    for _ in range(READS):
        events.clear()
        with plain_parameters():
            tally = LiveBytes([*trainer.model.parameters()])
        with mock.patch.object(Division, "start_gather", noted), tally:
            tensors_of = tensors.read(tensors.pieces)
            while (item := next(tensors_of, None)) is not None:
                events.append(f"use {item[0]}")
                item = None
                time.sleep(0.005)  # a transfer to the reader's client
        peaks.append(tally.peak)
    trainer.helix.close()
    largest = max(piece.nbytes for piece in tensors.pieces)
    return {"events": events, "peak": min(peaks), "largest": largest}


@pytest.mark.parametrize("helix", [TP, PP], ids=str)
def test_one_gather_for_each_parameter_and_no_more_memory_than_the_largest(
    helix: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    model = {"vocab_size": 1031}
    names = [name for name, _ in tiny(num_hidden_layers=5, **model).named_parameters()]
    ranks = cluster_of(2).run(cost, folder=str(tmp_path), helix=helix, model=model)
    for result in ranks:
        gathered = [event.removeprefix("gather ") for event in result["events"] if event.startswith("gather ")]
        assert len(gathered) == len(set(gathered))
        assert set(gathered) <= set(names)
        assert len(gathered) == len(names) or helix == TP  # ranks have all of the norms
        assert result["largest"] <= result["peak"] <= result["largest"] + SLACK
    events = ranks[0]["events"]
    assert sorted(event.removeprefix("use ") for event in events if event.startswith("use ")) == sorted(names)
    used, following = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"
    assert events.index(f"gather {following}") < events.index(f"use {used}") < events.index(f"have {following}")
