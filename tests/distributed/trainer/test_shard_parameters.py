"""`shard_parameters=True`: the run is that of stock data parallelism, under every plan, with a part of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import jobs, sharding_jobs
from support.comparisons import compare_runs, compare_weights
from support.derived_models import HOME
from support.models import tiny
from support.pipeline_jobs import make, window_of
from support.sharding_checks import (
    FEW_PLANS,
    PLANS,
    TrainingCase,
    WindowCase,
    check_bits_in_bf16,
    check_training,
    check_windows,
)
from support.versions import since
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_helix.operators.zero.flat_parameter import FlatParameter
from hf_helix.operators.zero.zero3 import UNITS_AHEAD
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.schedule.actions import Slot

SHARDED = {"shard_parameters": True, "cache": False}
CLIPPED = {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
BF16 = {"bf16": True}
SGD = {"optim": "sgd", "learning_rate": 0.5}  # AdamW makes much of small differences
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
SCHEDULE_FREE = {**CLIPPED, "optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "save_strategy": "epoch"}
SLOW = pytest.mark.slow


# -- in the processes of a cluster ---------------------------------------------------------------------------------


def train_with_fsdp2(folder: str, weights: str, **options: Any) -> dict[str, Any]:
    """The stock Trainer on a model that Transformers spreads with FSDP2 (`fully_shard`) when it loads it."""
    model = AutoModelForCausalLM.from_pretrained(weights, distributed_config=DistributedConfig(fsdp_size=2))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with mock.patch.object(jobs, "tiny", return_value=model):
        return jobs.train(folder, None, **options)


def alive(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> tuple[int, int]:
    """The most flats that are gathered at the same time under `sequential`: in a window, and in one of evaluation."""
    trainer = make(folder, {**helix, **SHARDED, "plan": "sequential"}, model)
    runner, found = trainer.helix.runner, []
    forward = [[Slot(forward=slot.forward) for slot in slots if slot.forward] for slots in runner.scheduler(3)]
    for program in (runner.program(3), runner.build_program(forward, ())):
        now = most = 0
        for instruction in program:
            op = instruction.operator
            if op is not None and op.part is not Part.W:
                now += sum(name.removeprefix("r.").startswith("weights") for _, name in instruction.writes)
            most = max(most, now)
            now -= sum(name.removeprefix("r.").startswith("weights") for _, name in instruction.frees)
        assert now == 0
        found.append(most)
    trainer.helix.close()
    return found[0], found[1]


def waits(folder: str) -> list[tuple[str, str, bool]]:
    """In a window under `sequential`, each gather of weights that computation waits for, the computation behind it, and
    whether it is of the same unit and micro-batch."""
    trainer = make(folder, {**SHARDED, "plan": "sequential"}, {"num_hidden_layers": 4})
    trainer.model.train()
    runner = trainer.helix.runner
    window = window_of(trainer, 3, 2, (17,))
    places = {
        runner.executor.label(batch.key[1], unit, op): (batch.key[1], unit, bool(op.ahead))
        for batch in window
        for unit in runner.stage.units
        for forward in (True, False)
        for op in runner.layout.graph(unit, forward).operators
    }
    with runner.executor.streams.tracing() as trace:
        runner.train_window(window)
    trainer.helix.close()
    found = []
    for number, (verb, label) in enumerate(trace.events):
        if verb == "wait" and label in places and places[label][2]:
            reader = next(other for verb, other in trace.events[number:] if verb == "run")
            found.append((label, reader, places[label][:2] == places[reader][:2]))
    return found


# -- in the tests --------------------------------------------------------------------------------------------------

WINDOWS: dict[str, WindowCase] = {
    "llama": (2, {}, {}, {}),
    "llama tied": (2, {}, TIED, {}),
    "llama recomputed": (2, {"recompute": "full"}, {}, {}),
    "llama with adapters": (2, {}, {"lora": {}}, {}),
    "llama, some of a layer frozen": (2, {}, {"freeze": ["model.layers.1.mlp.up_proj.weight"]}, {}),
    "llama bf16": (2, {}, {}, BF16),
    "llama bf16, tied, with biases": (2, {}, {**TIED, **BIASED}, BF16),
    "llama bf16, recomputed": (2, {"recompute": "full"}, {}, BF16),
    "llama bf16 with adapters": (2, {}, {"lora": {}}, BF16),
    "llama bf16, some of a layer frozen": (2, {}, {"freeze": ["model.layers.1.mlp.up_proj.weight"]}, BF16),
    "llama bf16 tp2": (4, {"tp_size": 2}, TIED, BF16),
    "llama bf16 cp2": (2, {"cp_size": 2}, {}, BF16),
    "llama bf16 pp2": (4, {"pp_size": 2}, {"num_hidden_layers": 4}, BF16),
    "llama bf16 dp4": (4, {}, {}, BF16),
    "mixtral bf16": (2, {}, {"family": "mixtral"}, BF16),
    "mixtral bf16 ep2": (4, {"ep_size": 2}, {"family": "mixtral"}, BF16),
    "mixtral bf16 ep2 tp2": (4, {"ep_size": 2, "tp_size": 2}, {"family": "mixtral"}, BF16),
    "gpt2 bf16, selective": (2, {"recompute": "selective"}, {"family": "gpt2"}, BF16),
    "gemma3 bf16": (2, {}, {"family": f"{HOME}gemma3"}, BF16),
    "llama tp2": (4, {"tp_size": 2}, TIED, {}),
    "mixtral ep2": (4, {"ep_size": 2}, {"family": "mixtral"}, {}),
    "mixtral": (2, {}, {"family": "mixtral"}, {}),
    "gpt2 selective": (2, {"recompute": "selective"}, {"family": "gpt2"}, {}),
    "llama cp2": (2, {"cp_size": 2}, {}, {}),
    "llama pp2": (4, {"pp_size": 2}, {"num_hidden_layers": 4}, {}),
    "llama dp4": (4, {}, {}, {}),
    "gemma3": (2, {}, {"family": f"{HOME}gemma3"}, {}),
    "bf16 weights": (2, {}, {"dtype": "bfloat16"}, {}),
    "qwen3_moe": (2, {}, {"family": "qwen3_moe"}, {}),
    "qwen3_moe bf16": (2, {}, {"family": "qwen3_moe"}, BF16),
    "llama with dropout": (2, {}, {"attention_dropout": 0.3}, {}),
    "llama with NEFTune, recomputed": (2, {"recompute": "full"}, {}, {"neftune_noise_alpha": 5.0}),
}
QUICK = (
    "llama",
    "llama tied",
    "llama, some of a layer frozen",
    "llama recomputed",
    "llama bf16, tied, with biases",
    "llama tp2",
    "mixtral",
)


@pytest.mark.parametrize("case", [pytest.param(name, marks=[SLOW] * (name not in QUICK)) for name in WINDOWS])
def test_windows_are_those_of_whole_parameters(case: str, cluster_of: Any, tmp_path: Path) -> None:
    """The bits of all plans are the same; over two ranks they are those of the all-reduce of whole gradients, with
    weights gathered in bfloat16 where products alone read them, too."""
    check_windows(cluster_of, tmp_path, SHARDED, WINDOWS[case], PLANS if case == "llama" else FEW_PLANS)


TRAININGS: dict[str, TrainingCase] = {
    "llama": (2, {}, {"training": CLIPPED}),
    "llama, other weights in evaluation": (2, {}, {"training": SCHEDULE_FREE}),
    "llama tied, decayed": (2, {}, {"model": TIED, "training": {**CLIPPED, "weight_decay": 0.1}}),
    "llama tp2": (4, {"tp_size": 2}, {"training": CLIPPED}),
    "llama tp2, in tiles": (4, {"tp_size": 2, "plan": "intra_batch"}, {"training": CLIPPED}),
    "mixtral": (2, {}, {"model": {"family": "mixtral"}, "training": CLIPPED}),
    "llama dp4": (4, {}, {"training": CLIPPED}),
    "llama, recomputed": (2, {}, {"training": {**CLIPPED, "gradient_checkpointing": True}}),
    "llama, smoothed labels": (2, {}, {"training": {**CLIPPED, "label_smoothing_factor": 0.2}}),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[SLOW] * (name != "llama")) for name in TRAININGS])
def test_training_equals_stock_data_parallelism(case: str, cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """Losses, norms, rates, evaluation and saved weights are those of the stock Trainer with DDP."""
    check_training(cluster_of, stock, tmp_path, SHARDED, TRAININGS[case])


@pytest.mark.parametrize("helix", [{}, pytest.param({"tp_size": 2}, marks=SLOW)], ids=str)
def test_training_in_bf16_is_that_of_whole_parameters(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    check_bits_in_bf16(cluster_of, tmp_path, SHARDED, helix)


@since("5.19", "a Trainer that does not wrap in DDP what Transformers has spread with FSDP2")
@pytest.mark.parametrize(("precision", "factor"), [({}, 1), pytest.param({**BF16, **SGD}, 20, marks=SLOW)], ids=str)
def test_training_equals_stock_fsdp(precision: dict[str, Any], factor: float, cluster_of: Any, tmp_path: Path) -> None:
    """The stock Trainer's losses, norms, rates, evaluation and saved weights, with FSDP2 on two processes."""
    tiny().save_pretrained(tmp_path / "start")
    fsdp, mine, training = str(tmp_path / "fsdp"), str(tmp_path / "mine"), {**CLIPPED, **precision}
    job = {"folder": fsdp, "weights": str(tmp_path / "start"), "training": training}
    expected = cluster_of(2).run(train_with_fsdp2, **job)[0]
    for result in cluster_of(2).run("train", folder=mine, helix={**SHARDED, "plan": "greedy"}, training=training):
        compare_runs(result, expected, factor=factor)
    compare_weights(mine, fsdp, factor)


def test_plans_are_made_of_measured_gathers(cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """What `auto` does by itself: gathers are timed beside computation, plans are compared, and training goes on."""
    expected, _ = stock(jobs.train, dp=2, training=CLIPPED)
    job = {"folder": str(tmp_path), "training": CLIPPED}
    for result in cluster_of(2).run(sharding_jobs.tuned, sharded=SHARDED, **job):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        assert len(result["plans"]) > 2, result["verdict"]
        assert result["communication"] > 0
        assert min(result["memory"]) > 0
        assert not result["changed"]
        assert not result["left"]


@pytest.mark.parametrize(
    ("ranks", "helix", "training"),
    [
        (2, {}, {}),
        pytest.param(2, {}, BF16, marks=SLOW),
        pytest.param(4, {}, {}, marks=SLOW),
        pytest.param(4, {"tp_size": 2}, BF16, marks=SLOW),
    ],
    ids=str,
)
def test_a_rank_keeps_its_part(
    ranks: int, helix: dict[str, Any], training: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """Parameters take 4 bytes an element of the padded flats, divided by the ranks, and one element a stand-in; so do
    gradients behind a window; the averages of AdamW take 8 an element, without padding. So it is with bf16."""
    job = {"folder": str(tmp_path), "sharded": SHARDED, "helix": helix, "model": {}, "training": training}
    for rank in cluster_of(ranks).run(sharding_jobs.held, **job):
        over = ranks // helix.get("tp_size", 1)
        assert all(size == over for _, size in rank["flats"])
        share = sum(4 * length // over for length, _ in rank["flats"])
        stand_ins = 4 * len(rank["flats"])
        start, after, stepped = rank["bytes"]
        assert start == share + stand_ins
        assert after == 2 * share + stand_ins
        assert stepped == share + stand_ins + 8 * rank["elements"]
        assert rank["spared"] == 3 * (over - 1) * share


@pytest.mark.parametrize("training", [{}, pytest.param(BF16, marks=SLOW)], ids=str)
def test_a_window_has_few_layers_whole(training: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Beside what a window takes with whole parameters: forward, a few units' weights; backward, these, at most all
    gradients in whole and in part, and once more those that are being summed. With bf16, weights are gathered in the
    type of products, which have no copies of all weights then."""
    job = {"folder": str(tmp_path), "model": {"num_hidden_layers": 12}, "training": training}
    whole = cluster_of(2).run(sharding_jobs.peaks, helix={}, **job)
    for mine, other in zip(cluster_of(2).run(sharding_jobs.peaks, helix=SHARDED, **job), whole, strict=True):
        flats = list(zip(mine["flats"], mine["sizes"], strict=True))
        copies = sum(2 * length for length, size in flats if size == 2)
        assert bool(copies) == bool(training)
        everything, largest = 4 * sum(mine["flats"]), max(length * size for length, size in flats)
        assert mine["forward"] - other["forward"] + 0.9 * copies <= 3 * largest < everything / 4
        assert mine["window"] - other["window"] + 0.9 * copies <= everything * 3 / 2 + 4 * largest


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize(("training", "count"), [(BF16, 2), pytest.param({}, 2, marks=SLOW)], ids=str)
def test_what_a_window_sends(ranks: int, training: dict[str, Any], count: int, cluster_of: Any, tmp_path: Path) -> None:
    """Every gradient once, in fp32; for each micro-batch weights forward and again in backward, but for those of the
    first unit, whose backward reads none, and of the last one, which keeps them: what products read in bfloat16."""
    job = {"folder": str(tmp_path), "sharded": SHARDED, "training": training, "count": count}
    for result in cluster_of(ranks).run(sharding_jobs.sent, **job):
        d = result["ranks"]
        assert d == ranks
        layers = [size * length for places, length, size in result["flats"] if not {0, result["last"]} & set(places)]
        everything = sum(size * length for _, length, size in result["flats"])
        weights = count * (everything + sum(layers)) * (d - 1) // d
        gradients = sum(4 * length for _, length, _ in result["flats"]) * (d - 1) // d
        assert result["sent"] == weights + gradients
        assert result["summed"] == gradients
        assert result["gathered"] == weights
        halved = [length for _, length, size in result["flats"] if size == 2]
        assert bool(halved) == bool(training)
        if training:  # norms and the table of embeddings stay
            assert sum(halved) > sum(length for _, length, _ in result["flats"]) / 2


def test_few_units_are_whole_at_a_time(cluster_of: Any, tmp_path: Path) -> None:
    """Under `sequential`, the unit that computes and those that are gathered ahead; in a window also the head, which
    keeps what forward has gathered."""
    model = {"num_hidden_layers": 6}
    for found in cluster_of(2).run(alive, folder=str(tmp_path), helix={}, model=model):
        assert found == (UNITS_AHEAD + 2, UNITS_AHEAD + 1)


def test_weights_are_waited_for_by_what_reads_them(cluster_of: Any, tmp_path: Path) -> None:
    """And not at the barriers before."""
    for found in cluster_of(2).run(waits, folder=str(tmp_path)):
        assert len(found) == 3 * (6 + 4), "each once: forward, and layers again in backward"
        assert [each for each in found if not each[2]] == []


REFUSED = {
    "two shardings": ({"shard_optimizer": True}, {}, "shard_optimizer=False"),
    "graphs": ({"cuda_graphs": True}, {}, "cuda_graphs=False"),
    "optimizers of whole matrices": ({}, {"optim": "adafactor"}, "shard_parameters=True a rank holds only a part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused(case: str, cluster_of: Any, tmp_path: Path) -> None:
    helix, training, words = REFUSED[case]
    options = {"folder": str(tmp_path), "helix": {**SHARDED, **helix}, "training": training}
    for error in cluster_of(2).errors(jobs.construct, **options):
        assert error.kind == "ValueError"
        assert words in error.message


def test_a_flat_splits_alike_on_all_ranks() -> None:
    """Every element of every parameter belongs to one rank."""
    from hf_helix.operators.communication.transport import Axis, SilentTransport
    from hf_helix.operators.param_shard import COPIED

    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in ((7, 5), (3,), (64, 2), (1,))]
    seen = [torch.full((value.numel(),), torch.nan) for value in values]
    for rank in range(3):
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        axis = Axis(SilentTransport(3, rank))
        flat = FlatParameter("weights", dict.fromkeys(parameters, COPIED), axis, axis)
        flat.shard_in_place(torch.device("cpu"))
        for place, parameter in enumerate(parameters):
            assert parameter.shape == values[place].shape
            assert parameter.isnan().all()
            first, last = flat.owned_range(parameter)
            assert seen[place][first:last].isnan().all()
            seen[place][first:last] = flat.shards[parameter].detach()
    for value, result in zip(values, seen, strict=True):
        assert torch.equal(result, value.reshape(-1))
