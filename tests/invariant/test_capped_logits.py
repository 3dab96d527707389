"""`predict()` gives what the model's own forward gives, for a family that caps its logits under names of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.jobs import build
from support.models import VOCABULARY, sequences
from transformers import LlamaConfig, LlamaForCausalLM

from hf_helix import register_model
from hf_helix.models.families.llama import Llama

CAP = 0.3  # behind the head, as in Gemma 2


def test_predict_gives_the_logits_of_the_model(cluster_of: Any, tmp_path: Path) -> None:
    """In processes of their own, where the family is registered."""
    job = {"job": "invariant.test_capped_logits:predictions", "folder": str(tmp_path)}
    (wanted,) = cluster_of(1).run(**job, helix=None)
    assert 0.9 * CAP < np.abs(wanted["logits"]).max() <= CAP
    for result in [
        *cluster_of(1).run(**job, helix={}),
        *cluster_of(2).run(**job, helix={"tp_size": 2, "plan": "greedy"}),
    ]:
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["logits"], wanted["logits"], rtol=0, atol=1e-5)


class CappedForCausalLM(LlamaForCausalLM):
    """Llama whose logits are `cap * tanh(logits / cap)`."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        result = super().forward(input_ids, **{**kwargs, "num_items_in_batch": None})
        result.logits = CAP * torch.tanh(result.logits / CAP)
        if labels is not None:
            result.loss = self.loss_function(result.logits, labels, self.config.vocab_size, **kwargs)
        return result


class Capped(Llama):
    model_class = "CappedForCausalLM"

    def loss(self, b: Any, model: Any, x: str) -> str:
        h = b.all_gather("gather", b.norm("norm", self.final_norm(model), x))
        (h,) = b.column_parallel("out", {"raw": model.lm_head}, h)
        h = b.segment("cap", lambda logits: CAP * torch.tanh(logits / CAP), h)
        return b.loss("loss", h, model.lm_head.weight.shape[0])


def predictions(folder: str, helix: dict[str, Any] | None) -> dict[str, Any]:
    """A step of training, then logits."""
    register_model(Capped())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = CappedForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    trainer = build(folder, helix, {"max_steps": 2}, model=model, train_dataset=sequences(4))
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"logits": trainer.predict(sequences(3)).predictions, "losses": logged}
