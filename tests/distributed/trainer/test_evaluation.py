"""What the Trainer offers around the training step works on a cut model as it does on a whole one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.comparisons import compare_predictions
from support.derived_models import HOME
from support.jobs import Recorder, Stream, build, predict
from support.models import llama, sequences

# -- what the ranks run ------------------------------------------------------------------------------------------------


def train_with(
    folder: str,
    helix: dict[str, Any] | None,
    training: dict[str, Any],
    streamed: bool = False,
    from_init: bool = False,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on a list or a stream, with a model or what makes one, and record what callbacks see."""
    rows, recorder = sequences(60, **(data or {})), Recorder()
    changes = model or {}
    made: dict[str, Any] = {"model_init": lambda: llama(**changes)} if from_init else {"model": llama(**changes)}
    trainer = build(
        folder, helix, training, train_dataset=Stream(rows) if streamed else rows, callbacks=[recorder], **made
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "tokens": [entry.get("num_input_tokens_seen") for entry in logs],
        "seen": trainer.state.num_input_tokens_seen,
        "events": recorder.events,
        "counts": Counter(name for name, _ in recorder.events),
    }


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
    "tp2 dp2": (4, {"tp_size": 2}, ("odd number",)),
    "cp2": (2, {"cp_size": 2}, ("lengths differ",)),
    "cp2 tp2": (4, {"cp_size": 2, "tp_size": 2}, ()),
    "pp2": (2, {"pp_size": 2, "schedule": "folded_1f1b"}, ("padded left",)),
    "pp2, 1f1b": (2, {"pp_size": 2, "schedule": "1f1b"}, ()),
    "pp2 tp2": (4, {"pp_size": 2, "tp_size": 2, "schedule": "folded_1f1b"}, ()),
    "pp2 dp2": (4, {"pp_size": 2, "schedule": "folded_1f1b"}, ("odd number", "lengths differ")),
    "pp2 tp2 dp2": (8, {"pp_size": 2, "tp_size": 2, "schedule": "dualpipe_v"}, ()),
}
SLOW = pytest.mark.slow
ACCUMULATING = {"gradient_accumulation_steps": 2, "max_steps": 4}


def model_for(layout: str, **changes: Any) -> dict[str, Any]:
    """Pipelines need four layers; one of five stages holds more than the others."""
    return {"num_hidden_layers": 5 if "pp" in layout else 3, **changes}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=() if case in quick else SLOW)
        for layout, (_, _, quick) in LAYOUTS.items()
        for case in PREDICTIONS
    ],
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


def test_predictions_of_a_derived_model(cluster_of: Any, tmp_path: Path) -> None:
    """Whose logits are capped."""
    model = {"family": f"{HOME}gemma2", "num_hidden_layers": 2}
    given = {"folder": str(tmp_path), "count": 4, "lengths": (17, 17, 8, 8), "model": model}
    expected = predict(helix=None, **given)
    for result in cluster_of(2).run(predict, helix={"tp_size": 2}, **given):
        compare_predictions(result, expected, with_loss=True)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        ("tp2 dp2", "non_padding"),
        ("pp2", "all"),
        *(pytest.param(layout, "all", marks=SLOW) for layout in ("tp2", "pp2 dp2")),
        *(pytest.param(*case, marks=SLOW) for case in (("tp2", "non_padding"), ("tp2 dp2", "all"))),
        *(pytest.param("dp2", count, marks=SLOW) for count in ("all", "non_padding")),
    ],
)
def test_tokens_are_counted_once_and_callbacks_hear_the_same(
    layout: str, count: str, cluster_of: Any, tmp_path: Path
) -> None:
    """Against the stock Trainer with as many samples a step in one process."""
    ranks, helix, _ = LAYOUTS[layout]
    dp = 2 if "dp2" in layout else 1
    training = {**ACCUMULATING, "include_num_input_tokens_seen": count}
    case = {"data": {"lengths": (17, 9), "padding": "right"}, "model": model_for(layout)}
    expected = train_with(str(tmp_path), None, {**training, "per_device_train_batch_size": 2 * dp}, **case)
    every = 17 * 4 * 4 * dp
    assert expected["seen"] == every if count == "all" else 0 < expected["seen"] < every
    assert expected["counts"]["on_log"] == 4 + 1  # every step, and once at the end
    assert expected["counts"]["on_substep_end"] == expected["counts"]["on_step_end"] == 4
    job = {"folder": str(tmp_path), "helix": {"plan": "greedy", **helix}, "training": training}
    for result in cluster_of(ranks).run(train_with, **job, **case):
        for name in ("seen", "tokens", "events"):
            assert result[name] == expected[name], name


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("tp2", "streamed"),
        ("pp2", "from_init"),
        pytest.param("tp2", "from_init", marks=SLOW),
        pytest.param("pp2", "streamed", marks=SLOW),
    ],
)
def test_iterable_datasets_and_model_init(layout: str, how: str, cluster_of: Any, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "training": ACCUMULATING, "model": model_for(layout), how: True}
    expected = train_with(helix=None, **given)
    assert len(set(expected["losses"])) == 4
    for result in cluster_of(2).run(train_with, helix={"plan": "greedy", **LAYOUTS[layout][1]}, **given):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)


def test_a_frozen_embedding_trains_like_the_stock_trainer(like_stock: Any) -> None:
    freeze = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    like_stock(2, {"tp_size": 2}, training={"max_steps": 5}, freeze=freeze)
