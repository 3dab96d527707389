"""Completions by a server: weights of a cut model by TRL's client, bit by bit, and whole runs as the stock trainer's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.marks import slow
from support.sft_jobs import save_tokenizer
from support.trl_jobs import log_of, make, model
from support.vllm_server import Server, stands_in_for_vllm

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
    job = {"tokenizer": str(tmp_path / "words"), "kind": kind, "shares": helix in (SHARDS, ZERO1, EP)}
    logs, servers = [], []
    for name in ("stock", "helix"):
        server = Server(model(given.get("family", "Llama"), 0, **given.get("sizes", {})))
        whole = {**job, "given": {**given, **server.arguments}, "folder": str(tmp_path / name)}
        logs.append([run(helix=None, **whole)] if name == "stock" else cluster_of(2).run(run, helix=helix, **whole))
        server.close()
        servers.append(server)
    (wanted,), found = logs
    assert servers[0].requests == servers[1].requests
    for log in found:
        for mine, stock in zip(log, wanted, strict=True):
            if job["shares"]:
                stock.pop("total_flos", None), mine.pop("total_flos", None)  # smaller batches are padded less
            assert mine == pytest.approx(stock, rel=1e-5, abs=2e-6)
    expected, weights = saved(tmp_path / "helix" / "last", given), servers[1].weights
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []
