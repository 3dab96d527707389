"""What a layout saves is the checkpoint that Transformers saves, whatever the other ranks started from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from invariant.classes import BIASED, GPTS, MHA, TIED
from support.comparisons import assert_same, stored
from support.derived_models import HOME
from support.marks import slow
from support.models import tiny
from transformers import AutoModelForCausalLM

FOLD, TP = {"pp_size": 2}, {"tp_size": 2}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # ranks, model, options
    "llama tied tp2 pp2": (4, TIED, {**TP, **FOLD}),
    "llama 1f1b": (2, {}, {**FOLD, "schedule": "1f1b"}),
    "phimoe": (2, {"family": "phimoe"}, {"ep_size": 2}),
    "gpt2": (2, GPTS["gpt2"], TP),
}
SLOW: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "llama dp2": (2, {}, {}),
    "llama mha, biases": (2, {**BIASED, **MHA}, TP),
    "llama pp2 dp2": (4, {}, FOLD),
    "llama tied pp2": (2, TIED, FOLD),
    **{family: (2, {"family": family}, {"ep_size": 2}) for family in ("mixtral", "qwen3_moe")},
    **{name: (2, GPTS[name], TP) for name in ("neox", "neox in turn")},
    "derived, fused": (2, {"family": f"{HOME}phi3"}, TP),
    "derived, experts": (2, {"family": f"{HOME}gpt_oss"}, {"ep_size": 2}),
}


@pytest.mark.parametrize("case", [*CASES, *map(slow, SLOW)])
def test_what_is_saved_is_the_stock_checkpoint(case: str, cluster_of: Any, tmp_path: Path) -> None:
    """A tied weight is saved once, under the embedding's name."""
    ranks, changes, helix = (CASES | SLOW)[case]
    ours, theirs, model = tmp_path / "helix", tmp_path / "stock", {"num_hidden_layers": 5, **changes}
    job = {"folder": str(ours), "helix": {**helix, "plan": "greedy"}, "model": model}
    cluster_of(ranks).run("save_untrained", own_weights=True, **job)
    original = tiny(**model).eval()
    original.save_pretrained(theirs)
    assert_same(stored(ours), stored(theirs))
    loaded, how = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert type(loaded) is type(original)
    assert not any(how[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(1, 18).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, original(ids).logits)
        words = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(loaded.generate(ids, **words), original.generate(ids, **words))
