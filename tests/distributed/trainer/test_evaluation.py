"""What the Trainer offers around the training step works on a cut model as it does on a whole one."""

from pathlib import Path
from typing import Any

import pytest
from support.comparisons import compare_predictions
from support.derived_models import HOME
from support.jobs import predict
from support.marks import slow

# -- the tests --------------------------------------------------------------------------------------------------------

PREDICTIONS: dict[str, dict[str, Any]] = {
    "even number": {"count": 6},
    "odd number": {"count": 5},
    "lengths differ": {"count": 7, "lengths": (17, 17, 8, 8, 13, 13)},
    "padded left": {"count": 5, "lengths": (17, 9, 13), "padding": "left"},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    # ranks, options, what is predicted in the quick suite
    "tp2": (2, {"tp_size": 2}, ("padded left",)),
    "dp2": (2, {}, ()),
    "tp2 dp2": (4, {"tp_size": 2}, ()),
    "cp2": (2, {"cp_size": 2}, ("lengths differ",)),
    "cp2 tp2": (4, {"cp_size": 2, "tp_size": 2}, ()),
    "pp2": (2, {"pp_size": 2, "schedule": "folded_1f1b"}, ()),
    "pp2, 1f1b": (2, {"pp_size": 2, "schedule": "1f1b"}, ()),
    "pp2 tp2, slices": (4, {"pp_size": 2, "tp_size": 2, "spread_vocabulary": True}, ("odd number",)),
    "pp2 tp2": (4, {"pp_size": 2, "tp_size": 2, "schedule": "folded_1f1b"}, ()),
    "pp2 dp2": (4, {"pp_size": 2, "schedule": "folded_1f1b"}, ("lengths differ",)),
    "pp2 tp2 dp2": (8, {"pp_size": 2, "tp_size": 2, "schedule": "dualpipe_v"}, ()),
}


def model_for(layout: str, **changes: Any) -> dict[str, Any]:
    """Pipelines need four layers; one of five stages holds more than the others."""
    return {"num_hidden_layers": 5 if "pp" in layout else 3, **changes}


@pytest.mark.parametrize(
    ("case", "layout"),
    [slow(case, layout, when=case not in quick) for layout, (_, _, quick) in LAYOUTS.items() for case in PREDICTIONS],
)
def test_predict_and_evaluate(case: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    """Logits of every sample once and in order, on every rank, also where the last batch is filled up."""
    ranks, helix, _ = LAYOUTS[layout]
    given = {"folder": str(tmp_path), "model": model_for(layout), **PREDICTIONS[case]}
    expected = predict(helix=None, **given)
    for result in cluster_of(ranks).run(predict, helix={"plan": "greedy", **helix}, **given):
        assert result["predicted"]["test_samples"] == PREDICTIONS[case]["count"]
        # The stock loss is a mean over batches, which are others on data-parallel ranks.
        compare_predictions(result, expected, with_loss="dp" not in layout)


@pytest.mark.slow
def test_predictions_of_a_derived_model(cluster_of: Any, tmp_path: Path) -> None:
    """Whose logits are capped."""
    model = {"family": f"{HOME}gemma2", "num_hidden_layers": 2}
    given = {"folder": str(tmp_path), "count": 4, "lengths": (17, 17, 8, 8), "model": model}
    expected = predict(helix=None, **given)
    for result in cluster_of(2).run(predict, helix={"tp_size": 2}, **given):
        compare_predictions(result, expected, with_loss=True)


def test_a_frozen_embedding_trains_like_the_stock_trainer(like_stock: Any) -> None:
    freeze = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    like_stock(2, {"tp_size": 2}, training={"max_steps": 5}, freeze=freeze)
