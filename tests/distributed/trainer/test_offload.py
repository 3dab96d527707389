"""`offload="optimizer"` and `offload="parameters"`: bit for bit the run without them, on every layout; a run goes on
with either and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.comparisons import assert_same, stored
from support.marks import slow
from support.resume_jobs import make

from hf_helix.config import OFFLOADS
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.runtime.divided import plain_parameters

JOB = "support.resume_jobs:run"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
    "dp2": {},
    "ep2": {"ep_size": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_parameters": {"shard_parameters": True},
    "ep2 shard_parameters": {"ep_size": 2, "shard_parameters": True},
    "slices": {"pp_size": 2, "spread_vocabulary": True},
    "tp2 pp2": {"tp_size": 2, "pp_size": 2},
    "copies": {"shard_parameters": True, "dp_replicate_size": 2},
    "pp4": {"pp_size": 4},
    "pp2 shard_optimizer": {"pp_size": 2, "shard_optimizer": True},
    "pp2 shard_parameters": {"pp_size": 2, "shard_parameters": True},
}
FOUR = ("tp2 pp2", "copies", "pp4", "pp2 shard_optimizer", "pp2 shard_parameters")  # ranks
OPTIMIZER, PARAMETERS = OFFLOADS
BF16 = {"bf16": True}
TIED = {"model": {"tie_word_embeddings": True}}
TUNED = {"plan": "auto", "tuning_share": 1.0, "cache": False}
FROZEN = {"freeze": ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]}
SCHEDULE_FREE = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}


def options_of(
    layout: str,
    offload: str | None,
    training: dict[str, Any] | None = None,
    helix: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Options of a job: clipped, over two micro-batches."""
    options = {"plan": "greedy", **LAYOUTS[layout], **(helix or {}), "offload": offload}
    if layout == "pp4":
        more["model"] = {"num_hidden_layers": 8, **more.get("model", {})}
    if "ep2" in layout:
        more["model"] = {"family": "mixtral", **more.get("model", {})}
    return {
        "helix": options,
        "training": {"optim": "adamw_torch_fused", "max_grad_norm": 0.3, **(training or {})},
        **more,
    }


def assert_same_weights(mine: Path, theirs: Path) -> None:
    """The saved weights have the same bits."""
    assert_same(*(stored(folder / "checkpoint-4") for folder in (mine, theirs)))


CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((layout, OPTIMIZER, {"training": BF16}) for layout in LAYOUTS),
    *((layout, PARAMETERS, {"training": BF16}) for layout in LAYOUTS if not layout.endswith("shard_optimizer")),
    *((layout, kind, {}) for layout in ("tp2", "pp2", "shard_parameters") for kind in OFFLOADS),
    ("pp4", PARAMETERS, {"training": BF16, **TIED}),
    ("dp2", PARAMETERS, {"training": {"optim": "sgd", "max_grad_norm": 0.0}}),
    ("pp2", OPTIMIZER, {"training": SCHEDULE_FREE}),
    ("tp2", PARAMETERS, {"helix": {"recompute": "full"}, "training": BF16, **TIED}),
    ("tp2 pp2", PARAMETERS, {"helix": {"recompute": "offload"}, "training": BF16}),
    ("tp2", PARAMETERS, {"training": BF16, **FROZEN}),
    ("pp2", PARAMETERS, {"helix": {"plan": "sequential", "schedule": "1f1b"}}),
]
QUICK = ("shard_parameters", PARAMETERS, {"training": BF16})


@pytest.mark.parametrize(
    ("layout", "kind", "options"), [slow(*case, when=case != QUICK, id=str(case)) for case in CASES]
)
def test_a_run_has_the_bits_of_the_run_without(
    layout: str, kind: str, options: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    with_it, without = (
        cluster_of(4 if layout in FOUR else 2).run(
            JOB, folder=str(tmp_path / str(offload)), **options_of(layout, offload, **options)
        )
        for offload in (kind, None)
    )
    for mine, theirs in zip(with_it, without, strict=True):
        for key in ("losses", "rates", "eval"):
            assert mine[key] == theirs[key], key
    assert_same_weights(tmp_path / kind, tmp_path / "None")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind", "options"),
    [
        ("tp2", OPTIMIZER, {"training": {"optim": "adagrad"}}),  # which has states before its first step
        ("tp2", PARAMETERS, {"helix": TUNED}),  # plans are measured with the copies
        ("pp2", PARAMETERS, {"helix": TUNED}),
    ],
    ids=str,
)
def test_a_run_has_the_losses_of_the_run_without(
    layout: str, kind: str, options: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """Where an optimizer that is a loop by default is fused with it, or another plan may be the fastest."""
    with_it, without = (
        cluster_of(2).run(JOB, folder=str(tmp_path / str(offload)), **options_of(layout, offload, **options))
        for offload in (kind, None)
    )
    assert list(with_it[0]["losses"].values()) == pytest.approx(list(without[0]["losses"].values()), abs=1e-5)


@pytest.mark.parametrize(
    ("first", "offloads", "second", "then", "exactly"),
    [
        ("pp2", OPTIMIZER, "pp2", None, True),
        slow("pp2", None, "pp2", OPTIMIZER, True),
        slow("pp2", OPTIMIZER, "pp2", PARAMETERS, True),
        slow("shard_optimizer", OPTIMIZER, "shard_parameters", OPTIMIZER, False),
        slow("pp2", PARAMETERS, "tp2", PARAMETERS, False),
        slow("shard_parameters", PARAMETERS, "dp2", None, False),
    ],
)
def test_a_run_goes_on_with_it_and_without_it(
    first: str, offloads: str | None, second: str, then: str | None, exactly: bool, cluster_of: Any, tmp_path: Path
) -> None:
    whole = cluster_of(2).run(JOB, folder=str(tmp_path / "whole"), **options_of(first, offloads))
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = cluster_of(2).run(JOB, folder=str(tmp_path / "again"), resume=checkpoint, **options_of(second, then))
    for mine, theirs in zip(resumed, whole, strict=True):
        assert list(mine["losses"].values()) == pytest.approx(list(theirs["losses"].values()), abs=1e-5)
        assert mine["rates"] == theirs["rates"]
    if exactly:
        assert_same_weights(tmp_path / "again", tmp_path / "whole")


def test_one_process_steps_on_its_host(tmp_path: Path) -> None:
    """The device keeps weights in the type of products; masters, states and gradients are the host's. torch's default
    optimizer is fused there, and the number of threads is as before."""
    trainer = make(str(tmp_path), {"offload": "optimizer"}, training={"optim": "adamw_torch", "max_steps": 2, **BF16})
    threads = torch.get_num_threads()
    trainer.train()
    assert torch.get_num_threads() == threads
    rank_units, optimizer = trainer.helix.runner.rank_units, trainer.optimizer
    flats = rank_units.flat_parameters
    shards = [shard for flat in flats for shard in flat.shards.values()]
    with plain_parameters():
        assert len(shards) == len(list(trainer.model.parameters()))
        assert {id(each) for group in optimizer.param_groups for each in group["params"]} == set(map(id, shards))
        assert all(optimizer.state[shard]["exp_avg"].shape == shard.shape for shard in shards)
        assert all(flat.host is not None and flat.shard.dtype == torch.float32 for flat in flats)
        buffers = {flat.name: flat.buffer for flat in zero1_flat_parameters(flats)}
        assert buffers["weights.products"].dtype == torch.bfloat16
        assert all(flat.buffer.data_ptr() != flat.shard.data_ptr() for flat in zero1_flat_parameters(flats))
    assert all(group["fused"] for group in optimizer.param_groups)
    # A step that fails leaves its param groups complete.
    failing = optimizer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    failing.remove()
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert held == set(map(id, shards))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("pp2", {"training": BF16}),
        slow("pp2", {"helix": {"plan": "dhelix", "schedule": "dualpipe_v"}}),
        slow("shard_parameters", {"training": BF16}),
        slow("pp4", TIED),
        slow("tp2", {"helix": TUNED}),
    ],
    ids=str,
)
def test_inputs_of_layers_on_the_host_have_the_bits_of_those_on_the_device(
    layout: str, options: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """`recompute="offload"` and "full"."""
    for mode in ("full", "offload"):
        helix = {**options.get("helix", {}), "recompute": mode}
        given = options_of(layout, None, **{**options, "helix": helix})
        cluster_of(4 if layout in FOUR else 2).run(JOB, folder=str(tmp_path / mode), **given)
    assert_same_weights(tmp_path / "offload", tmp_path / "full")


def test_the_device_keeps_no_weights_between_windows(tmp_path: Path) -> None:
    trainer = make(str(tmp_path), {"offload": "parameters"}, training={"max_steps": 2, **BF16})
    trainer.train()
    parameters = list(trainer.model.parameters())
    with plain_parameters():
        assert all(parameter.data.untyped_storage().nbytes() <= 4 for parameter in parameters)
        assert all(flat.unsharded is None for flat in trainer.helix.runner.rank_units.flat_parameters)


@pytest.mark.parametrize(
    ("optim", "said"),
    [
        ("grokadamw", "optim='grokadamw': use optim='adamw_torch_fused', or leave out offload='optimizer'"),
        ("adamw_bnb_8bit", "only optimizers that treat every element or every matrix by itself"),
        ("paged_adamw_32bit", "the host's cores step the weights"),
    ],
)
def test_other_optimizers_are_refused(optim: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        jobs.make_trainer(str(tmp_path), {"offload": "optimizer"}, training={"optim": optim})


def test_an_own_optimizer_says_what_it_reads(tmp_path: Path) -> None:
    given = (torch.optim.LBFGS, {"lr": 1e-3})
    with pytest.raises(ValueError, match=r"LBFGS, \.\.\.\): with offload='optimizer' the host's cores step"):
        jobs.make_trainer(str(tmp_path), {"offload": "optimizer"}, optimizer_cls_and_kwargs=given)
