"""What a layout saves is the checkpoint that Transformers saves, whatever the other ranks started from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from invariant.classes import GPTS, MIXTURES
from safetensors.torch import load_file
from support.derived_models import HOME
from support.models import tiny
from support.pipeline_trainer_jobs import model_of
from transformers import AutoModelForCausalLM

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{family: ({"family": family}, {"tp_size": 2}) for family in ("mistral", "qwen2", "qwen3")},
    **{family: ({"family": family}, {"ep_size": 2}) for family in MIXTURES},
    **{name: (GPTS[name], {"tp_size": 2}) for name in ("gpt2", "neox", "neox in turn")},
    "derived, fused": ({"family": f"{HOME}phi3"}, {"tp_size": 2}),
    "derived, experts": ({"family": f"{HOME}gpt_oss"}, {"ep_size": 2}),
}


SLOW = ("derived, fused", "derived, experts")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_what_is_saved_is_the_stock_checkpoint(case: str, cluster_of: Any, tmp_path: Path) -> None:
    model, helix = CASES[case]
    ours, theirs = tmp_path / "helix", tmp_path / "stock"
    job = {"folder": str(ours), "helix": {**helix, "plan": "greedy"}, "model": model}
    cluster_of(2).run("support.pipeline_trainer_jobs:save_untrained", own_weights=True, **job)
    original = tiny(**model_of(**model)).eval()
    original.save_pretrained(theirs)
    result, expected = stored(ours), stored(theirs)
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name], tensor), name
    loaded, how = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert type(loaded) is type(original)
    assert not any(how[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(1, 18).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, original(ids).logits)
        words = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(loaded.generate(ids, **words), original.generate(ids, **words))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file, each once."""
    result: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert not result.keys() & tensors.keys()
        result |= tensors
    assert result
    return result
