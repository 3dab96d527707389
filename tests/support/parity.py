"""Windows on several ranks against the unsplit model: losses, gradients by name, and all plans bit for bit alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from support.models import tiny
from support.pipeline_jobs import batches_of, reference
from support.pipeline_trainer_jobs import model_of
from transformers import AutoModelForCausalLM

KINDS = ("dense", "left", "right", "packed")
LENGTHS = (33, 16, 21)  # two of them do not divide
PLANS = ("sequential", "greedy", "round_robin", "dhelix")
OPTIONS = ("cp_method", "cross_node", "ep_size", "expert_capacity_factor", "recompute")

Reference = Callable[[dict[str, Any], int, str], dict[str, Any]]


def references() -> Reference:
    """The unsplit model's windows, each run once."""
    known: dict[Any, Any] = {}

    def get(model: dict[str, Any], count: int, kind: str) -> dict[str, Any]:
        key = (str(sorted(model.items())), count, kind)
        if key not in known:
            known[key] = reference(model, batches_of(count, lengths=LENGTHS, kind=kind))
        return known[key]

    return get


def check(
    cluster: Any,
    folder: Any,
    expected: Reference,
    sizes: tuple[int, ...],
    kind: str,
    plans: Sequence[str],
    job: str = "support.pipeline_jobs:windows",
    **changes: Any,
) -> None:
    """Run a window under every plan and compare.

    Args:
        sizes: of context, tensor, pipeline and data parallelism.
        changes: to the model, and options of `HelixConfig` among `OPTIONS`.
    """
    cp, tp, pp, dp = sizes
    options = {key: changes.pop(key) for key in OPTIONS if key in changes}
    model = {"num_hidden_layers": max(2, 2 * pp), **changes}
    count = 3
    ep_size = options.get("ep_size", 1)
    helix = {"cp_size": cp, "tp_size": tp, "pp_size": pp, "plan": "sequential", **options}
    cases = [(plan, "w", count) for plan in plans]
    given = {"folder": str(folder), "helix": helix, "model": model, "cases": cases, "lengths": LENGTHS, "kind": kind}
    ranks = cluster.run(job, **given)
    wanted = expected(model, count * dp, kind)
    share = cp * tp * pp
    for place, plan in enumerate(plans):
        for d in range(dp):
            mine = dp * np.array(wanted["losses"][d * count : (d + 1) * count])
            for rank in range(d * share, (d + 1) * share):
                np.testing.assert_allclose(ranks[rank][place]["losses"], mine, rtol=0, atol=1e-5 * dp, err_msg=plan)
            found = ranks[d * share][place]["gradients"]
            assert found.keys() == wanted["gradients"].keys()
            for name, gradient in wanted["gradients"].items():
                if found[name] is None:
                    assert ".experts." in name
                    assert d % ep_size  # they are joined on the first of those that share them
                    continue
                distance = np.linalg.norm(found[name].astype(np.float64) - gradient)
                assert distance <= 1e-4 * np.linalg.norm(gradient) + 1e-12, f"{plan}: {name}"
        assert ranks[0][place]["losses"] == ranks[0][0]["losses"]
        for name, gradient in ranks[0][place]["gradients"].items():
            assert gradient is not None
            np.testing.assert_array_equal(gradient, ranks[0][0]["gradients"][name], err_msg=f"{plan}: {name}")


def check_saved(cluster: Any, folder: Any, family: str, helix: dict[str, Any]) -> None:
    """What a layout saves loads in Transformers: every name, no other, the same logits."""
    job = {"folder": str(folder), "helix": {**helix, "plan": "greedy"}, "model": {"family": family}}
    cluster.run("support.pipeline_trainer_jobs:save_untrained", own_weights=True, **job)
    original = tiny(family, **model_of()).eval()
    loaded, how = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is type(original)
    assert not any(how[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(1, 18).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, original(ids).logits)
