"""Completions by a server: weights of a cut model by TRL's client, bit by bit; whole runs as the stock trainer's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.forked_ranks import fork_ranks
from support.marks import slow
from support.sft_jobs import save_tokenizer
from support.trl_jobs import log_of, make, model
from support.vllm_server import Colocated, Server, stands_in_for_vllm
from transformers import TrainerCallback

from hf_helix.integrations.trainer.rollouts import check_rollouts, feed_rollouts

TP, PP, EP = {"tp_size": 2}, {"pp_size": 2}, {"ep_size": 2}
SHARDS, ZERO1 = {"shard_parameters": True}, {"shard_optimizer": True}
EXPERTS = {"family": "Qwen3Moe", "lora": {"target_parameters": ["gate.weight"]}}
TIED = {"sizes": {"tie_word_embeddings": True}}


def run(folder: str, **given: Any) -> list[dict[str, Any]]:
    """The log of a short run; what the server has at its end, is saved, too."""
    with stands_in_for_vllm():
        trainer = make(folder, **given)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        trainer.save_model(f"{folder}/last")
        trainer.vllm_generation.accelerator.wait_for_everyone()
    return log_of(trainer)


def saved(folder: Path, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint; of adapters, those of the model with them, as PEFT merges it."""
    if "lora" in given:
        whole = model(given.get("family", "Llama"), 0, **given.get("sizes", {}))
        PeftModel.from_pretrained(whole, folder).merge_and_unload().save_pretrained(folder := folder / "merged")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "helix", "given"),
    [
        ("grpo", TP, {"lora": True}),
        ("grpo", PP, {}),
        slow("grpo", TP, {**TIED, "num_iterations": 2}),
        slow("grpo", EP, {"family": "Mixtral"}),
        slow("grpo", PP, {"family": "Mixtral"}),
        slow("grpo", EP, EXPERTS),
        slow("grpo", TP, EXPERTS),
        slow("grpo", SHARDS, {}),
        slow("grpo", SHARDS, {"lora": True}),
        slow("grpo", ZERO1, {}),
        slow("rloo", PP, {"lora": True}),
        slow("distillation", TP, {"max_completion_length": 6}),
    ],
    ids=str,
)
def test_runs_with_a_server_as_the_stock_trainer(
    kind: str, helix: dict[str, Any], given: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "words")
    shares = helix in (SHARDS, ZERO1, EP)  # then the stock trainer is DDP's on two processes
    job = {"tokenizer": str(tmp_path / "words"), "kind": kind, "shares": shares}
    logs, servers = [], []
    for name, layout in {"stock": None, "helix": helix}.items():
        server = Server(model(given.get("family", "Llama"), 0, **given.get("sizes", {})))
        whole = {**job, "given": {**given, **server.arguments}, "folder": str(tmp_path / name), "helix": layout}
        logs.append(cluster_of(2).run(run, **whole) if shares or layout else [run(**whole)])
        server.close()
        servers.append(server)
    wanted, found = logs[0][0], logs[1]
    assert servers[0].requests == servers[1].requests
    for log in found:
        for mine, stock in zip(log, wanted, strict=True):
            if shares:
                stock.pop("total_flos", None), mine.pop("total_flos", None)  # stock counts a process's share of a batch
            assert mine == pytest.approx(stock, rel=1e-5, abs=2e-6)
    expected, weights = saved(tmp_path / "helix" / "last", given), servers[1].weights
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []


class Edits(TrainerCallback):
    """Writes to a frozen weight after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            with torch.no_grad():
                model.get_base_model().model.norm.weight.mul_(1.5)


def run_edited(folder: str, **given: Any) -> None:
    with stands_in_for_vllm():
        trainer = make(folder, **given)
        trainer.add_callback(Edits())
        trainer.train()


@pytest.mark.parametrize("helix", [TP, slow(SHARDS)], ids=str)
def test_a_part_of_the_model_is_sent_again_only_if_it_may_have_changed(
    helix: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """A layer is sent whole: vLLM loads q, k and v together."""
    save_tokenizer(tmp_path / "words")
    whole = model("Llama", 0)
    server = Server(whole)
    training = {"max_steps": 5, "steps_per_generation": 3, "beta": 0.0, **server.arguments}
    given = {"lora": {"target_modules": ["q_proj"], "layers_to_transform": [1, 3]}, **training}
    job = {"folder": str(tmp_path), "tokenizer": str(tmp_path / "words"), "kind": "grpo", "shares": helix == SHARDS}
    cluster_of(2).run(run_edited, helix=helix, given=given, **job)
    server.close()
    first, *others = map(set, server.updates)
    names = set(dict(whole.named_parameters()))
    trained = {name for name in names if name.startswith(("model.layers.1.", "model.layers.3."))}
    assert first == names
    assert others == [trained, trained | {"model.norm.weight"}, trained, trained]
    assert torch.equal(server.weights["model.norm.weight"], 1.5 * whole.model.norm.weight)


def run_colocated(folder: str, **given: Any) -> dict[str, Any]:
    with stands_in_for_vllm():
        Colocated.model = model("Llama", 0)
        trainer = make(folder, **given)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        trainer.save_model(f"{folder}/last")
    llm = trainer.vllm_generation.llm
    return {"log": log_of(trainer), "weights": llm.weights, "updates": llm.updates, "prompts": llm.prompts}


@pytest.mark.parametrize(("helix", "sleeps"), [(TP, True), slow(PP, False), slow(SHARDS, False)], ids=str)
def test_ranks_of_a_batch_share_its_prompts_out_to_vllm_in_their_processes(
    helix: dict[str, Any], sleeps: bool, cluster_of: Any, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "words")
    training = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleeps}
    given = {"lora": {"target_modules": ["q_proj"], "layers_to_transform": [1]}, "beta": 0.0, **training}
    job = {"folder": str(tmp_path), "tokenizer": str(tmp_path / "words"), "kind": "grpo", "shares": helix == SHARDS}
    ranks = cluster_of(2).run(run_colocated, helix=helix, given=given, **job)
    expected = saved(tmp_path / "last", given)
    for result in ranks:
        assert [name for name, value in expected.items() if not torch.equal(result["weights"][name], value)] == []
        sizes = [len(names) for names in result["updates"] if names]
        of_layer = sum(name.startswith("model.layers.1.") for name in expected)
        assert set(sizes[1:]) == ({len(expected)} if sleeps else {of_layer})
        assert result["log"] == ranks[0]["log"]  # also compared by ranks that share a batch
    counts = [len(result["prompts"]) for result in ranks]
    generated = 4 * 2 * 6  # rows of a batch, steps of a generation, generations
    assert counts == [generated // 2] * 2


def test_what_vllm_cannot_be_sent_is_refused() -> None:
    asked = SimpleNamespace(use_vllm=True)
    with pytest.raises(
        ValueError, match=r"use_vllm=True with a base in 4 bits.*use use_vllm=False, with which the cut"
    ):
        check_rollouts(asked, SimpleNamespace(is_loaded_in_4bit=True))
    check_rollouts(SimpleNamespace(), SimpleNamespace(is_loaded_in_4bit=True))
    with pytest.raises(ValueError, match=r"SimpleNamespace has no vllm_generation.*use use_vllm=False"):
        feed_rollouts(SimpleNamespace(args=asked), Any)


SCRIPT = """
import sys
from support.trl_jobs import make
from support.vllm_server import stands_in_for_vllm

with stands_in_for_vllm():
    make("out", "words", {"tp_size": 2}, "grpo", False, eval(sys.argv[1])).train()
"""


def test_a_server_that_fails_ends_every_rank(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words")
    (tmp_path / "script.py").write_text(SCRIPT)
    server = Server(model("Llama", 0), breaks_at=1)
    ranks = fork_ranks(tmp_path, tmp_path / "script.py", repr(server.arguments))
    assert [process.wait(120) for process in ranks] == [1, 1]
    server.close()
    for place in range(2):
        assert "Request failed: 400" in (tmp_path / f"{place}.log").read_text()
    assert "rank 0 failed: " in (tmp_path / "1.log").read_text()
