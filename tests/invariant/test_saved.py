"""What a layout saves is the checkpoint that Transformers saves, whatever the other ranks started from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from invariant.classes import BIASED, GPTS, MHA, MIXTURES, TIED
from support.comparisons import assert_same, stored
from support.derived_models import HOME
from support.marks import slow
from support.models import tiny
from transformers import AutoModelForCausalLM

FOLD, TP_PP = {"pp_size": 2}, {"pp_size": 2, "tp_size": 2}
QUICK = ("llama mha, biases tp_size", "llama tied tp2 pp2", "llama pp2 dp2", "llama 1f1b", "phimoe", "gpt2")

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # ranks, model, options
    **{f"llama {size}": (2, {}, {size: 2}) for size in ("tp_size", "dp")},
    **{f"llama tied {size}": (2, TIED, {size: 2}) for size in ("tp_size", "dp", "pp_size")},
    **{f"llama mha, biases {size}": (2, {**BIASED, **MHA}, {size: 2}) for size in ("tp_size", "dp")},
    "llama tp2 pp2": (4, {}, TP_PP),
    "llama tied tp2 pp2": (4, TIED, TP_PP),
    "llama pp2 dp2": (4, {}, FOLD),
    "llama 1f1b": (2, {}, {**FOLD, "schedule": "1f1b"}),
    **{family: (2, {"family": family}, {"tp_size": 2}) for family in ("mistral", "qwen2", "qwen3")},
    **{family: (2, {"family": family}, {"ep_size": 2}) for family in MIXTURES},
    **{name: (2, GPTS[name], {"tp_size": 2}) for name in ("gpt2", "neox", "neox in turn")},
    "derived, fused": (2, {"family": f"{HOME}phi3"}, {"tp_size": 2}),
    "derived, experts": (2, {"family": f"{HOME}gpt_oss"}, {"ep_size": 2}),
}


@pytest.mark.parametrize("case", [slow(c, when=c not in QUICK) for c in CASES])
def test_what_is_saved_is_the_stock_checkpoint(case: str, cluster_of: Any, tmp_path: Path) -> None:
    """A tied weight is saved once, under the embedding's name."""
    ranks, changes, helix = CASES[case]
    ours, theirs, model = tmp_path / "helix", tmp_path / "stock", {"num_hidden_layers": 5, **changes}
    helix = {name: size for name, size in helix.items() if name != "dp"}
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
