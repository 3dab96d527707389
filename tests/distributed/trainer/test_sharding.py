"""`shard_optimizer=True` and `shard_parameters=True`: the run is that of stock data parallelism, under every plan; a
rank keeps, sends and gathers what the formulas say.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.at_once import collectives_at_once
from support.comparisons import compare_runs, compare_weights
from support.derived_models import HOME
from support.marks import slow
from support.models import tiny
from support.pipeline_jobs import make, runner_of, window_of
from support.tuning_jobs import hasty
from support.versions import since
from transformers import AutoModelForCausalLM

from hf_helix.measure.memory import LiveBytes
from hf_helix.measure.overlap import bytes_spared, bytes_summed, transports
from hf_helix.operators.communication.transport import Recorder
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.runtime.divided import plain_parameters

LENGTHS = (33, 16, 21)
FEW_PLANS = ("sequential", "greedy", "dhelix")
PLANS = (*FEW_PLANS, "round_robin", "search")
OPTIMIZER = {"shard_optimizer": True, "cache": False}
PARAMETERS = {"shard_parameters": True, "cache": False}
MICROBATCH = {"reduce_gradients": "microbatch"}
OFTEN = {**PARAMETERS, **MICROBATCH}
CLIPPED = {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
BF16 = {"bf16": True}
SGD = {"optim": "sgd", "learning_rate": 0.5}  # AdamW makes much of small differences
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
FROZEN = {"freeze": ["model.layers.1.mlp.up_proj.weight"]}
MIXTRAL, PHIMOE = {"family": "mixtral"}, {"family": "phimoe"}
SCHEDULE_FREE = {**CLIPPED, "optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "save_strategy": "epoch"}

# -- in the processes of a cluster: `sharded` are the options that are tested ------------------------------------------


@plain_parameters()
def windows(
    folder: str,
    sharded: dict[str, Any],
    helix: dict[str, Any],
    model: dict[str, Any],
    plans: Sequence[str],
    training: dict[str, Any],
) -> dict[str, Any]:
    """A window without sharding, and the same with sharding under several plans.

    Returns:
        The losses; by plan, what has other bits of gradients than the parts of the gradients without sharding, and by
        how much in parts of the norm; how many shards there are; what is wrong after a window.
    """
    freeze = model.pop("freeze", ())
    whole = make(folder, {**helix, "dp_replicate_size": 1, "plan": "sequential"}, model, training, freeze)
    whole.model.train()
    expected = [loss.item() for loss in whole.helix.runner.train_window(window_of(whole, 3, 2, LENGTHS))]
    gradients = {name: parameter.grad for name, parameter in whole.model.named_parameters()}
    norm = whole.helix.gradient_norm().item()
    whole.helix.close()
    trainer = make(folder, {**helix, **sharded, "plan": "sequential"}, model, training, freeze)
    trainer.model.train()
    rank_units = trainer.helix.runner.rank_units
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    flats = {parameter: flat for flat in rank_units.flat_parameters for parameter in flat.placements}
    result: dict[str, Any] = {"expected": expected, "norm": norm, "plans": {}, "shards": len(rank_units.shards)}
    for plan in plans:
        with hasty():
            runner = runner_of(trainer, plan, "folded_1f1b")
        losses = [loss.item() for loss in runner.train_window(window_of(trainer, 3, 2, LENGTHS))]
        differing, errors, bits = [], [0.0], {}
        for parameter in rank_units.own_rows:
            name, other = names[parameter], gradients[names[parameter]]
            stepped = flats[parameter].shards[parameter] if parameter in flats else parameter
            assert (stepped.grad is None) == (other is None), name
            if stepped.grad is None:
                continue
            first, last = flats[parameter].owned_range(parameter) if parameter in flats else (0, parameter.numel())
            mine, part = stepped.grad.reshape(-1), other.reshape(-1)[first:last]
            bits[name] = mine.clone()
            differing += [] if torch.equal(mine, part) else [name]
            distance = torch.linalg.vector_norm(mine.double() - part.double())
            errors.append(float(distance / torch.linalg.vector_norm(other.double()).clamp_min(1e-30)))
        first_bits = result.setdefault("bits", bits)
        result["plans"][plan] = {
            "losses": losses,
            "differing": differing,
            "error": max(errors),
            "norm": trainer.helix.gradient_norm().item(),
            "unlike the first plan": [name for name, each in bits.items() if not torch.equal(each, first_bits[name])],
            "left": [names[p] for p in flats if p.grad is not None or not p.isnan().all()],
        }
        forget_gradients(trainer)
        assert all(shard.grad is None for shard in rank_units.shards.values())
    del result["bits"]
    trainer.helix.close()
    return result


@plain_parameters()
def held(
    folder: str,
    sharded: dict[str, Any],
    helix: dict[str, Any],
    model: dict[str, Any],
    training: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The bytes that this rank really keeps: before a window, behind it, and with an optimizer that has stepped."""
    training = {"optim": "adamw_torch", **(training or {})}
    trainer = make(folder, {**helix, **sharded, "plan": "sequential"}, model, training)
    trainer.model.train()
    rank_units, optimizer = trainer.helix.runner.rank_units, trainer.create_optimizer()
    kept = [
        *rank_units.own_rows,
        *rank_units.stepped,
        *(flat.buffer for flat in zero1_flat_parameters(rank_units.flat_parameters)),
    ]
    start = bytes_of(kept)
    trainer.helix.runner.train_window(window_of(trainer, 3, 2, (33,)))
    gradients = [parameter.grad for parameter in kept if parameter.is_leaf and parameter.grad is not None]
    after = bytes_of([*kept, *gradients])
    optimizer.step()
    forget_gradients(trainer)
    averages = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    stepped = bytes_of([*kept, *averages])
    flats = [(flat.length, flat.gather_axis.size) for flat in rank_units.flat_parameters]
    pieces = [flat.buffer.element_size() for flat in zero1_flat_parameters(rank_units.flat_parameters)]
    elements = sum(parameter.numel() for parameter in rank_units.stepped)
    spared = sum(map(bytes_spared, rank_units.flat_parameters))
    trainer.helix.close()
    return {"bytes": (start, after, stepped), "flats": flats, "pieces": pieces, "elements": elements, "spared": spared}


def forget_gradients(trainer: Any) -> None:
    """Does to what this rank steps what `zero_grad` does."""
    for parameter in trainer.helix.runner.rank_units.stepped:
        parameter.grad = None


@plain_parameters()
def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of the memory that tensors are in, each once."""
    result = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(result.values())


@plain_parameters()
def peaks(
    folder: str, helix: dict[str, Any], model: dict[str, Any], training: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The most bytes that tensors take in a window and in a forward pass, beside what is kept between windows."""
    trainer = make(folder, {**helix, "plan": "sequential"}, model, training)
    trainer.model.train()
    runner = trainer.helix.runner
    window = window_of(trainer, 2, 1, (17,))
    runner.train_window(window)  # what is made once is there, and gradients where they stay
    flats = runner.rank_units.flat_parameters
    if flats:
        forget_gradients(trainer)
    else:
        trainer.model.zero_grad(set_to_none=False)
    kept = [t for p in runner.rank_units.stepped for t in (p, p.grad) if t is not None]
    kept += [flat.buffer for flat in zero1_flat_parameters(flats)]
    result = {}
    for name, run in {"window": runner.train_window, "forward": runner.evaluate}.items():
        with collectives_at_once(runner.executor.streams), LiveBytes(kept) as tally:
            run(window)
        result[name] = tally.peak
    trainer.helix.close()
    sizes = [(flat.cast_to or flat.shard.dtype).itemsize for flat in flats]
    return {**result, "flats": [flat.length for flat in flats], "sizes": sizes}


@plain_parameters()
def sent(folder: str, sharded: dict[str, Any], training: dict[str, Any], count: int) -> dict[str, Any]:
    """The bytes that this rank sends over the data-parallel axes in a window of so many micro-batches.

    Returns:
        All of them, and those of the axis that weights are gathered over; what was moved; of every flat, the units
        that have it, its elements and the bytes of one of them in what is gathered; the last unit.
    """
    trainer = make(folder, {**sharded, "plan": "greedy"}, {}, training)
    trainer.model.train()
    runner, first = trainer.helix.runner, trainer.helix.runner.rank_units.flat_parameters[0]
    axes = list(dict.fromkeys((first.gather_axis, first.reduce_axis)))
    recorders = [Recorder(axis.transport) for axis in axes]
    with transports(axes, recorders):
        runner.train_window(window_of(trainer, count, 2, (17,)))
    moves = [move for recorder in recorders for move in recorder.moved]
    flats = [
        (
            [place for place, unit in runner.rank_units.units.items() if flat in unit.flat_parameters.values()],
            flat.length,
            (flat.cast_to or flat.shard.dtype).itemsize,
        )
        for flat in runner.rank_units.flat_parameters
    ]
    trainer.helix.close()
    return {
        "sent": sum(recorder.bytes_sent for recorder in recorders),
        "summed": bytes_summed(runner, count),
        "gathered": recorders[0].bytes_sent,
        "moved": [(move.name, move.value[0].numel() * move.value[1].itemsize) for move in moves],
        "flats": flats,
        "last": max(runner.rank_units.units),
        "ranks": first.gather_axis.size,
    }


@plain_parameters()
def evaluated(folder: str, helix: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """Losses of one batch before the first step and behind every step, twice each; how often weights were gathered for
    each; and of a window that follows."""
    trainer = make(folder, {**helix, "plan": "sequential"}, {}, training)
    runner, optimizer = trainer.helix.runner, trainer.create_optimizer()
    (batch,), window = window_of(trainer, 1, 2, (17,)), window_of(trainer, 2, 2, LENGTHS)
    flats = list(zero1_flat_parameters(runner.rank_units.flat_parameters))
    axis = flats[0].reduce_axis if flats else None
    result: dict[str, Any] = {"losses": [], "gathers": []}

    def evaluate() -> None:
        trainer.model.eval()
        recorders = [Recorder(axis.transport)] if axis else []
        with transports([axis] if axis else [], recorders), torch.no_grad():
            result["losses"].append(runner.evaluate([batch])[0].item())
        result["gathers"] += [len(recorder.moved) / len(flats) for recorder in recorders]

    for _ in range(3):
        evaluate()
        evaluate()
        trainer.model.train()
        result["losses"] += [loss.item() for loss in runner.train_window(window)]
        evaluate()
        optimizer.step()
        forget_gradients(trainer)
    trainer.helix.close()
    return result


def generated(folder: str, helix: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Trains, and uses the model directly: refused by itself, and with all weights in it."""
    trainer: Any = jobs.make_trainer(folder, helix, **options)
    trainer.train()
    model, ids = trainer.model, torch.tensor([[1, 2, 3]])
    with pytest.raises(RuntimeError) as caught:
        model(ids)
    refused = [str(caught.value)]
    with trainer.helix.full_weights() as whole:
        assert whole is model
        model.eval()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
        assert model.state_dict().keys()
        for use in (trainer.evaluate, lambda: trainer.save_model(folder), trainer.helix.full_weights().__enter__):
            with pytest.raises(RuntimeError) as caught:
                use()
            refused.append(str(caught.value))
        if trainer.args.process_index == 0:  # is lost
            for parameter in model.parameters():
                parameter.data.zero_()
    with plain_parameters():
        left = [name for name, parameter in model.named_parameters() if not parameter.isnan().all()]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(folder)
    return {"text": text, "weights": weights, "left": left, "refused": refused, "eval": evaluated}


def whole_weights_of_a_part(folder: str, helix: dict[str, Any]) -> None:
    """Asks for all weights where every rank has slices."""
    with jobs.make_trainer(folder, helix).helix.full_weights():  # type: ignore[attr-defined]
        pass


def waits(folder: str) -> list[tuple[str, str, bool]]:
    """In a window under `sequential`, each gather of weights that computation waits for, the computation behind it, and
    whether it is of the same unit and micro-batch."""
    trainer = make(folder, {**PARAMETERS, "plan": "sequential"}, {"num_hidden_layers": 4})
    trainer.model.train()
    runner = trainer.helix.runner
    window = window_of(trainer, 3, 2, (17,))
    places = {
        runner.executor.label(batch.key[1], unit, op): (batch.key[1], unit, bool(op.ahead))
        for batch in window
        for unit in runner.rank_units.units
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

Windows = dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]]
"""By name: ranks, options of HelixConfig, the model, the training."""

FOUR = {"num_hidden_layers": 4}
QUICK: dict[str, Windows] = {
    "shard_optimizer": {
        "llama bf16, tied, with biases": (2, {}, {**TIED, **BIASED}, BF16),
        "llama bf16, some of a layer frozen": (2, {}, FROZEN, BF16),
        "phimoe ep2 without copies of experts": (2, {"ep_size": 2}, PHIMOE, {}),
    },
    "shard_parameters": {
        "llama": (2, {}, {}, {}),
        "llama bf16, tied, with biases": (2, {}, {**TIED, **BIASED}, BF16),
        "llama tp2": (4, {"tp_size": 2}, TIED, {}),
        "phimoe": (2, {}, PHIMOE, {}),
    },
    "every micro-batch": {
        "llama bf16, tied, with biases": (2, {}, {**TIED, **BIASED}, BF16),
        "llama dp4 in two copies": (4, {"dp_replicate_size": 2}, {}, {}),
    },
}
SLOW: Windows = {
    "llama bf16 with adapters": (2, {}, {"lora": {}}, BF16),
    "llama bf16, recomputed": (2, {"recompute": "full"}, {}, BF16),
    "llama bf16 pp2": (4, {"pp_size": 2}, FOUR, BF16),
    "mixtral bf16 ep2 tp2": (4, {"ep_size": 2, "tp_size": 2}, MIXTRAL, BF16),
    "gpt2 bf16, selective": (2, {"recompute": "selective"}, {"family": "gpt2"}, BF16),
    "gemma3 bf16": (2, {}, {"family": f"{HOME}gemma3"}, BF16),
    "llama cp2": (2, {"cp_size": 2}, {}, {}),
    "llama bf16 dp4": (4, {}, {}, BF16),
    "llama cp2 in two copies": (4, {"cp_size": 2, "dp_replicate_size": 2}, {}, {}),
    "mixtral ep2 in two copies": (8, {"ep_size": 2, "dp_replicate_size": 2}, MIXTRAL, {}),
    "mixtral ep2 in two copies, whole experts": (4, {"ep_size": 2, "dp_replicate_size": 2}, MIXTRAL, {}),
    "bf16 weights": (2, {}, {"dtype": "bfloat16"}, {}),
    "llama with dropout": (2, {}, {"attention_dropout": 0.3}, {}),
}
OF_PARAMETERS: Windows = {
    "qwen3_5": (2, {}, {"family": f"{HOME}qwen3_5"}, {}),
    "nemotron_h tp2": (4, {"tp_size": 2}, {"family": f"{HOME}nemotron_h"}, {}),
    "llama with NEFTune, recomputed": (2, {"recompute": "full"}, {}, {"neftune_noise_alpha": 5.0}),
}
OF_OPTIMIZER: Windows = {"llama bf16, compiled": (2, {"compile": True}, {}, BF16)}


@pytest.mark.parametrize(
    ("sharded", "case"),
    [
        slow(sharded, case, when=name not in QUICK[option], id=f"{option}, {name}")
        for option, sharded, more in (
            ("shard_optimizer", OPTIMIZER, OF_OPTIMIZER),
            ("shard_parameters", PARAMETERS, OF_PARAMETERS),
            ("every micro-batch", OFTEN, OF_PARAMETERS),
        )
        for name, case in {**QUICK[option], **SLOW, **more}.items()
    ],
)
def test_windows_are_those_without_sharding(
    sharded: dict[str, Any], case: Any, cluster_of: Any, tmp_path: Path
) -> None:
    """The bits of all plans are the same; over two ranks that reduce once they are those of the all-reduce of whole
    gradients, with weights in bfloat16 where products alone read them, too."""
    ranks, helix, model, training = case
    job = {"folder": str(tmp_path), "sharded": sharded, "helix": {"cache": False, **helix}, "training": training}
    plans = PLANS if case is QUICK["shard_parameters"]["llama"] else FEW_PLANS
    results = cluster_of(ranks).run(windows, model={"num_hidden_layers": 2, **model}, plans=plans, **job)
    rounding = 2**-8 if model.get("dtype") == "bfloat16" else 1e-5  # norms of bfloat16 are bfloat16, of parts as well
    sizes = np.prod([size for name, size in helix.items() if name in ("tp_size", "pp_size")])
    for rank in results:
        assert rank["shards"] > 0
        for plan, result in rank["plans"].items():
            assert result["losses"] == rank["expected"], plan
            assert result["unlike the first plan"] == [], plan
            assert result["left"] == [], plan
            assert result["norm"] == pytest.approx(rank["norm"], rel=rounding), plan
            if ranks // int(sizes) == 2 and sharded is not OFTEN:
                assert result["differing"] == [], plan
            assert result["error"] <= 1e-5, plan


TP2 = (4, {"tp_size": 2, "plan": "auto", "tuning_share": 1.0}, {"training": CLIPPED})
TRAININGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "llama": (2, {}, {"training": CLIPPED}),
    "llama, other weights in evaluation": (2, {}, {"training": SCHEDULE_FREE}),
    "llama tied, decayed": (2, {}, {"model": TIED, "training": {**CLIPPED, "weight_decay": 0.1}}),
    "llama tp2, with a plan that is measured": TP2,
    "llama dp4 in two copies": (4, {"dp_replicate_size": 2}, {"training": CLIPPED}),
    "llama pp2": (4, {"pp_size": 2}, {"model": FOUR, "training": CLIPPED}),
    "mixtral": (2, {}, {"model": MIXTRAL, "training": CLIPPED}),
}
MANY = {"model": {**FOUR, **TIED}, "training": {**CLIPPED, "gradient_accumulation_steps": 6}}
OF_ONE: list[tuple[str, str, tuple[int, dict[str, Any], dict[str, Any]]]] = [
    ("shard_optimizer", "mixtral ep2", (2, {"ep_size": 2}, {"model": MIXTRAL, "training": CLIPPED})),
    ("shard_parameters", "often, pp2", (4, {"pp_size": 2, "schedule": "dualpipe_v", **MICROBATCH}, MANY)),
    ("shard_parameters", "often, on the host", (2, {"offload": "optimizer", **MICROBATCH}, {"model": TIED})),
    ("shard_parameters", "smoothed labels", (2, {}, {"training": {**CLIPPED, "label_smoothing_factor": 0.2}})),
]


@pytest.mark.parametrize(
    ("option", "case"),
    [
        slow(option, case, when=name != "llama", id=f"{option}, {name}")
        for option, name, case in (
            *((option, *each) for option in ("shard_optimizer", "shard_parameters") for each in TRAININGS.items()),
            *OF_ONE,
        )
    ],
)
def test_training_equals_stock_data_parallelism(option: str, case: Any, like_stock: Any) -> None:
    """Losses, norms, rates, evaluation and saved weights are those of the stock Trainer with DDP."""
    ranks, helix, options = case
    like_stock(ranks, {option: True, "cache": False, "plan": "greedy", **helix}, **options)


@pytest.mark.slow
@since("5.19", "a Trainer that does not wrap in DDP what Transformers has spread with FSDP2")
@pytest.mark.parametrize(("precision", "factor"), [({}, 1), ({**BF16, **SGD}, 20)], ids=str)
def test_training_equals_stock_fsdp(precision: dict[str, Any], factor: float, cluster_of: Any, tmp_path: Path) -> None:
    """The stock Trainer's losses, norms, rates, evaluation and saved weights, with FSDP2 on two processes."""
    tiny().save_pretrained(tmp_path / "start")
    fsdp, mine, training = str(tmp_path / "fsdp"), str(tmp_path / "mine"), {**CLIPPED, **precision}
    job = {"folder": fsdp, "weights": str(tmp_path / "start"), "training": training}
    expected = cluster_of(2).run("train_with_fsdp2", **job)[0]
    for result in cluster_of(2).run("train", folder=mine, helix={**PARAMETERS, "plan": "greedy"}, training=training):
        compare_runs(result, expected, factor=factor)
    compare_weights(mine, fsdp, factor)


def test_evaluation_has_the_weights_that_were_stepped(cluster_of: Any, tmp_path: Path) -> None:
    """At any moment, and they are gathered once behind every step or window."""
    plain, sharded = (
        cluster_of(2).run(evaluated, folder=str(tmp_path), helix=helix, training=BF16)
        for helix in ({"cache": False}, OPTIMIZER)
    )
    for mine, theirs in zip(sharded, plain, strict=True):
        np.testing.assert_allclose(mine["losses"], theirs["losses"], rtol=0, atol=1e-6)
        assert mine["gathers"] == [1, 0, 1] * 3


@pytest.mark.parametrize(("option", "training"), [("shard_optimizer", {}), ("shard_parameters", BF16)])
def test_the_model_can_be_used_with_all_weights_in_it(
    option: str, training: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    helix = {option: True, "cache": False}
    job = {"folder": str(tmp_path), "helix": helix, "training": {"max_steps": 4, **training}}
    ranks = cluster_of(2).run(generated, **job)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = saved.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    for result in ranks:
        assert "within trainer.helix.full_weights()" in result["refused"][0]
        assert all("leave full_weights() before" in message for message in result["refused"][1:])
        assert result["eval"] == ranks[0]["eval"]
        assert result["text"] == text
        for name, value in saved.named_parameters():
            assert torch.equal(result["weights"][name], value), name
        assert result["left"] == []


def test_slices_are_no_whole_weights(cluster_of: Any, tmp_path: Path) -> None:
    helix = {**OPTIMIZER, "tp_size": 2}
    said = "tp_size=2: every rank has slices"
    cluster_of(4).assert_raises(whole_weights_of_a_part, said, folder=str(tmp_path), helix=helix)


# -- memory and traffic ----------------------------------------------------------------------------------------------


KEEPING = [
    (OPTIMIZER, 2, {}, {}),
    (OPTIMIZER, 2, {}, BF16),
    (PARAMETERS, 2, {}, {}),
    slow(OPTIMIZER, 4, {"tp_size": 2}, BF16),
    slow(PARAMETERS, 4, {"tp_size": 2}, BF16),
]


@pytest.mark.parametrize(("sharded", "ranks", "helix", "training"), KEEPING, ids=str)
def test_a_rank_keeps_its_part(
    sharded: dict[str, Any],
    ranks: int,
    helix: dict[str, Any],
    training: dict[str, Any],
    cluster_of: Any,
    tmp_path: Path,
) -> None:
    """Parameters take 4 bytes an element of the rank's part of the padded flats, and one element a stand-in; gradients
    behind a window as many; the averages of AdamW 8, without padding. A shared optimizer keeps all weights, in 4 bytes,
    or in 2 and the rank's part of them once more in 4."""
    job = {"folder": str(tmp_path), "sharded": sharded, "helix": helix, "model": {}, "training": training}
    for rank in cluster_of(ranks).run(held, **job):
        over = ranks // helix.get("tp_size", 1)
        assert all(size == over for _, size in rank["flats"])
        lengths = [length for length, _ in rank["flats"]]
        part = kept = sum(4 * length // over for length in lengths)
        if sharded is OPTIMIZER:
            assert (2 in rank["pieces"]) == bool(training)
            pieces = list(zip(rank["pieces"], lengths, strict=True))
            kept = sum(size * length + 4 * length // over * (size == 2) for size, length in pieces)
        start, after, stepped = rank["bytes"]
        assert start == kept + 4 * len(lengths)
        assert after == start + part
        assert stepped == start + 8 * rank["elements"]
        assert rank["spared"] == 12 * sum(lengths) - kept - 2 * part


def test_the_memory_of_a_window(cluster_of: Any, tmp_path: Path) -> None:
    """Beside what a window takes that keeps its gradients all the time: the gradients, those that are being summed once
    more, and the summed parts. Products in bf16 need no copies of the weights."""
    job = {"folder": str(tmp_path), "model": {"num_hidden_layers": 6}, "training": BF16}
    whole = cluster_of(2).run(peaks, helix={}, **job)
    for mine, other in zip(cluster_of(2).run(peaks, helix=OPTIMIZER, **job), whole, strict=True):
        everything, largest = 4 * sum(mine["flats"]), 4 * max(mine["flats"])
        halves = sum(2 * length for size, length in zip(mine["sizes"], mine["flats"], strict=True) if size == 2)
        assert halves
        assert mine["forward"] <= other["forward"] - 0.9 * halves
        assert mine["window"] <= other["window"] + everything * 3 / 2 + 2 * largest - 0.9 * halves


@pytest.mark.parametrize(
    ("ranks", "sharded", "training", "count"),
    [
        (2, OPTIMIZER, BF16, 1),
        (2, OPTIMIZER, {}, 3),
        (2, PARAMETERS, BF16, 2),
        (2, OFTEN, BF16, 2),
        *(slow(4, sharded, {}, 2) for sharded in (OPTIMIZER, PARAMETERS, OFTEN)),
    ],
    ids=str,
)
def test_what_a_window_sends(
    ranks: int, sharded: dict[str, Any], training: dict[str, Any], count: int, cluster_of: Any, tmp_path: Path
) -> None:
    """Every gradient once in fp32, or once for each micro-batch. With a shared optimizer every weight once, from the
    rank that steps it; with shared parameters, for each micro-batch, weights forward and again in backward, but for
    those of the first unit, whose backward reads none, and of the last one, which keeps them. Weights travel as
    products read them, in bfloat16."""
    job = {"folder": str(tmp_path), "sharded": sharded, "training": training, "count": count}
    for result in cluster_of(ranks).run(sent, **job):
        d, flats = result["ranks"], result["flats"]
        assert d == ranks
        weights = sum(size * length for _, length, size in flats)
        if sharded is OPTIMIZER:
            expected = ["all_gather"] * len(flats) + ["exchange"] * len(flats)
            assert [name for name, _ in result["moved"]] == expected
        else:
            layers = [size * length for places, length, size in flats if not {0, result["last"]} & set(places)]
            weights = count * (weights + sum(layers))
            assert result["gathered"] == weights * (d - 1) // d
        gradients = (count if sharded is OFTEN else 1) * sum(4 * length for _, length, _ in flats) * (d - 1) // d
        assert result["summed"] == gradients
        assert result["sent"] == gradients + weights * (d - 1) // d
        halved = [length for _, length, size in flats if size == 2]
        assert bool(halved) == bool(training)
        if training and sharded is not OPTIMIZER:  # norms and the table of embeddings stay
            assert sum(halved) > sum(length for _, length, _ in flats) / 2


def test_weights_are_waited_for_by_what_reads_them(cluster_of: Any, tmp_path: Path) -> None:
    """And not at the barriers before."""
    for found in cluster_of(2).run(waits, folder=str(tmp_path)):
        assert len(found) == 3 * (6 + 4), "each once: forward, and layers again in backward"
        assert [each for each in found if not each[2]] == []
