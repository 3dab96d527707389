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
from hf_helix.measure.operators import measure_profile
from hf_helix.measure.overlap import bytes_spared, bytes_summed, transports
from hf_helix.operators.communication.transport import Recorder
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.operators.zero.zero3 import UNITS_AHEAD
from hf_helix.planning.graph.operator import Part
from hf_helix.planning.schedule.actions import Slot
from hf_helix.planning.window.layout import named_gathers
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
        for parameter in rank_units.placements:
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
        *rank_units.placements,
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


def tuned(folder: str, sharded: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Trains as users do who say nothing of plans, and then asks for everything that can be measured."""
    trainer = jobs.make_trainer(folder, {**sharded, "tuning_share": 1.0}, **options)
    trainer.train()
    assert trainer.tuning is not None
    bits = [parameter.detach().clone() for parameter in trainer.helix.runner.rank_units.stepped]
    overlap, memory = trainer.helix.measure_overlap(repeats=1), trainer.helix.measure_memory()
    trainer.helix.trace(f"{folder}/trace.json")
    stepped = trainer.helix.runner.rank_units.stepped
    profile = trainer.tuning.profile
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval": trainer.evaluate()["eval_loss"],
        "verdict": str(trainer.tuning),
        "plans": sorted(trainer.tuning.overlaps),
        "communication": overlap.communication,
        "memory": memory,
        "gathers": sorted(name[1] for name in profile.times if name[0] == "weights") if profile else [],
        "changed": any(not torch.equal(*pair) for pair in zip(bits, stepped, strict=True)),
        "left": any(parameter.grad is not None for parameter in (*stepped, *trainer.model.parameters())),
    }


@plain_parameters()
def profiled(folder: str, sharded: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """Times of gathers of weights, in a profile; the bytes that this rank sends in each; what a measurement leaves."""
    trainer = make(folder, {**sharded, "plan": "sequential"}, {"num_hidden_layers": 2}, training)
    trainer.model.train()
    runner, window = trainer.helix.runner, window_of(trainer, 2, 2, (17,))
    stepped = runner.rank_units.stepped
    bits = [parameter.detach().clone() for parameter in stepped]
    profile = measure_profile(runner, window, pairs=False)
    names = [name for name, _ in named_gathers(runner.layout)]
    pieces = [
        runner.rank_units.all_units[gather.units[0]].flat_parameters[gather.name].buffer.nbytes
        for gather in runner.layout.gathers
    ]
    ranks = runner.rank_units.flat_parameters[0].gather_axis.size
    result = {
        "seconds": [profile.times[name] for name in names],
        "sent": [profile.bytes[name] for name in names],
        "expected": [size * (ranks - 1) // ranks for size in pieces],
        "changed": any(not torch.equal(*pair) for pair in zip(bits, stepped, strict=True)),
        "left": any(parameter.grad is not None for parameter in (*stepped, *trainer.model.parameters())),
    }
    trainer.helix.close()
    return result


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


def alive(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> tuple[int, int]:
    """The most flats that are gathered at the same time under `sequential`: in a window, and in one of evaluation."""
    trainer = make(folder, {**helix, **PARAMETERS, "plan": "sequential"}, model)
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

OF_BOTH: Windows = {
    "llama": (2, {}, {}, {}),
    "llama with adapters": (2, {}, {"lora": {}}, {}),
    "llama, some of a layer frozen": (2, {}, FROZEN, {}),
    "llama bf16": (2, {}, {}, BF16),
    "llama bf16, tied, with biases": (2, {}, {**TIED, **BIASED}, BF16),
    "llama bf16, recomputed": (2, {"recompute": "full"}, {}, BF16),
    "llama bf16 with adapters": (2, {}, {"lora": {}}, BF16),
    "llama bf16, some of a layer frozen": (2, {}, FROZEN, BF16),
    "llama bf16 tp2": (4, {"tp_size": 2}, TIED, BF16),
    "llama bf16 pp2": (4, {"pp_size": 2}, {"num_hidden_layers": 4}, BF16),
    "mixtral bf16": (2, {}, MIXTRAL, BF16),
    "mixtral bf16 ep2": (4, {"ep_size": 2}, MIXTRAL, BF16),
    "mixtral bf16 ep2 tp2": (4, {"ep_size": 2, "tp_size": 2}, MIXTRAL, BF16),
    "gpt2 bf16, selective": (2, {"recompute": "selective"}, {"family": "gpt2"}, BF16),
    "gemma3 bf16": (2, {}, {"family": f"{HOME}gemma3"}, BF16),
    "llama tp2": (4, {"tp_size": 2}, TIED, {}),
    "mixtral ep2": (4, {"ep_size": 2}, MIXTRAL, {}),
    "llama cp2": (2, {"cp_size": 2}, {}, {}),
    "llama pp2": (4, {"pp_size": 2}, {"num_hidden_layers": 4}, {}),
    "llama dp4": (4, {}, {}, {}),
    "llama dp4 in two copies": (4, {"dp_replicate_size": 2}, {}, {}),
    "llama bf16 dp4 in two copies": (4, {"dp_replicate_size": 2}, TIED, BF16),
    "llama cp2 in two copies": (4, {"cp_size": 2, "dp_replicate_size": 2}, {}, {}),
    "llama tp2 in two copies": (8, {"tp_size": 2, "dp_replicate_size": 2}, TIED, {}),
    "llama pp2 in two copies": (8, {"pp_size": 2, "dp_replicate_size": 2}, {"num_hidden_layers": 4}, {}),
    "mixtral ep2 in two copies": (8, {"ep_size": 2, "dp_replicate_size": 2}, MIXTRAL, {}),
    "mixtral ep2 in two copies, whole experts": (4, {"ep_size": 2, "dp_replicate_size": 2}, MIXTRAL, {}),
    "bf16 weights": (2, {}, {"dtype": "bfloat16"}, {}),
    "qwen3_moe bf16": (2, {}, {"family": "qwen3_moe"}, BF16),
    "llama with dropout": (2, {}, {"attention_dropout": 0.3}, {}),
}
OF_OPTIMIZER: Windows = {
    **OF_BOTH,
    "phimoe ep2 without copies of experts": (2, {"ep_size": 2}, PHIMOE, {}),
    "llama bf16, compiled": (2, {"compile": True}, {}, BF16),
}
OF_PARAMETERS: Windows = {
    **OF_BOTH,
    "llama tied": (2, {}, TIED, {}),
    "llama recomputed": (2, {"recompute": "full"}, {}, {}),
    "llama bf16 cp2": (2, {"cp_size": 2}, {}, BF16),
    "llama bf16 dp4": (4, {}, {}, BF16),
    "mixtral": (2, {}, MIXTRAL, {}),
    "phimoe": (2, {}, PHIMOE, {}),
    "gpt2 selective": (2, {"recompute": "selective"}, {"family": "gpt2"}, {}),
    "gemma3": (2, {}, {"family": f"{HOME}gemma3"}, {}),
    "qwen3_5": (2, {}, {"family": f"{HOME}qwen3_5"}, {}),
    "nemotron_h tp2": (4, {"tp_size": 2}, {"family": f"{HOME}nemotron_h"}, {}),
    "qwen3_moe": (2, {}, {"family": "qwen3_moe"}, {}),
    "llama with NEFTune, recomputed": (2, {"recompute": "full"}, {}, {"neftune_noise_alpha": 5.0}),
}
QUICK = {
    "shard_optimizer": (
        "llama bf16, tied, with biases",
        "llama bf16, some of a layer frozen",
        "phimoe ep2 without copies of experts",
    ),
    "shard_parameters": ("llama", "llama bf16, tied, with biases", "llama tp2", "phimoe"),
    "every micro-batch": ("llama bf16, tied, with biases", "llama dp4 in two copies"),
}


@pytest.mark.parametrize(
    ("sharded", "case"),
    [
        slow(sharded, case, when=name not in QUICK[option], id=f"{option}, {name}")
        for option, sharded, cases in (
            ("shard_optimizer", OPTIMIZER, OF_OPTIMIZER),
            ("shard_parameters", PARAMETERS, OF_PARAMETERS),
            ("every micro-batch", OFTEN, OF_PARAMETERS),
        )
        for name, case in cases.items()
    ],
)
def test_windows_are_those_without_sharding(
    sharded: dict[str, Any], case: Any, cluster_of: Any, tmp_path: Path
) -> None:
    """The bits of all plans are the same; over two ranks that reduce once they are those of the all-reduce of whole
    gradients, with weights in bfloat16 where products alone read them, too."""
    ranks, helix, model, training = case
    job = {"folder": str(tmp_path), "sharded": sharded, "helix": {"cache": False, **helix}, "training": training}
    plans = PLANS if case is OF_BOTH["llama"] else FEW_PLANS
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


TRAININGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "llama": (2, {}, {"training": CLIPPED}),
    "llama, other weights in evaluation": (2, {}, {"training": SCHEDULE_FREE}),
    "llama tied, decayed": (2, {}, {"model": TIED, "training": {**CLIPPED, "weight_decay": 0.1}}),
    "llama tp2": (4, {"tp_size": 2}, {"training": CLIPPED}),
    "llama tp2, in tiles": (4, {"tp_size": 2, "plan": "intra_batch"}, {"training": CLIPPED}),
    "llama dp4": (4, {}, {"training": CLIPPED}),
    "llama dp4 in two copies": (4, {"dp_replicate_size": 2}, {"training": CLIPPED}),
    "llama, recomputed": (2, {}, {"training": {**CLIPPED, "gradient_checkpointing": True}}),
}
OF_ONE = [
    (
        "shard_optimizer",
        "llama tp2 pp2",
        (8, {"tp_size": 2, "pp_size": 2}, {"model": {"num_hidden_layers": 4}, "training": CLIPPED}),
    ),
    ("shard_optimizer", "llama pp2", (4, {"pp_size": 2}, {"model": {"num_hidden_layers": 4}, "training": CLIPPED})),
    ("shard_optimizer", "mixtral ep2", (2, {"ep_size": 2}, {"model": MIXTRAL, "training": CLIPPED})),
    ("shard_parameters", "mixtral", (2, {}, {"model": MIXTRAL, "training": CLIPPED})),
    (
        "shard_parameters",
        "llama pp2, every micro-batch",
        (
            4,
            {"pp_size": 2, "schedule": "dualpipe_v", **MICROBATCH},
            {"model": {"num_hidden_layers": 4, **TIED}, "training": {**CLIPPED, "gradient_accumulation_steps": 6}},
        ),
    ),
    *(
        ("shard_parameters", f"{name}, every micro-batch", (ranks, {**helix, **MICROBATCH}, options))
        for name, (ranks, helix, options) in TRAININGS.items()
        if "other weights" not in name
    ),
    (
        "shard_parameters",
        "llama on the host, every micro-batch",
        (2, {"offload": "optimizer", **MICROBATCH}, {"model": TIED, "training": CLIPPED}),
    ),
    ("shard_parameters", "llama, smoothed labels", (2, {}, {"training": {**CLIPPED, "label_smoothing_factor": 0.2}})),
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
@pytest.mark.parametrize("helix", [{}, {"tp_size": 2}], ids=str)
@pytest.mark.parametrize("sharded", [OPTIMIZER, PARAMETERS], ids=["shard_optimizer", "shard_parameters"])
def test_training_in_bf16_is_that_without_sharding(
    sharded: dict[str, Any], helix: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """Training with `bf16=True` is that without sharding, which is compared with the stock Trainer elsewhere, and its
    checkpoint has the same fp32 weights: bit for bit, where gradients are not scaled by their norm, whose squares add
    up in another order."""
    ranks = 2 * helix.get("tp_size", 1)
    training = {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 1e6}
    plain, mine = (
        cluster_of(ranks).run("train", folder=str(tmp_path / name), helix={**options, **helix}, training=training)
        for name, options in {
            "plain": {"cache": False, "plan": "greedy"},
            "sharded": {**sharded, "plan": "greedy"},
        }.items()
    )
    for ours, theirs in zip(mine, plain, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert ours["eval"] == theirs["eval"]
        np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-5)
    saved, others = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("sharded", "plain")
    )
    assert any(not torch.equal(value, value.bfloat16()) for value in others.values()), "masters have more digits"
    for name, value in others.items():
        assert torch.equal(saved[name], value), name


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


@pytest.mark.parametrize("training", [{}, slow(BF16)], ids=str)
def test_gathers_are_measured(training: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Each has a time, and the bytes that a rank sends of its part; nothing else changes."""
    job = {"folder": str(tmp_path), "sharded": OPTIMIZER, "training": training}
    for result in cluster_of(2).run(profiled, **job):
        assert len(result["seconds"]) == len(result["sent"]) > 1
        assert min(result["seconds"]) > 0
        assert result["sent"] == result["expected"]
        assert not result["changed"]
        assert not result["left"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sharded"),
    [(4, {**OPTIMIZER, "tp_size": 2}), (2, PARAMETERS)],
    ids=["shard_optimizer", "shard_parameters"],
)
def test_plans_are_made_of_measured_gathers(
    ranks: int, sharded: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """What `auto` does by itself: gathers are timed, plans are compared, and training and evaluation go on."""
    expected, _ = stock(jobs.train, dp=2, training=CLIPPED)
    job = {"folder": str(tmp_path), "training": CLIPPED, "sharded": sharded}
    for result in cluster_of(ranks).run(tuned, **job):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        assert result["eval"] == pytest.approx(expected["eval"], abs=1e-5)
        assert len(result["plans"]) > 2, result["verdict"]
        assert result["gathers"] or sharded is PARAMETERS
        assert result["communication"] > 0
        assert min(result["memory"]) > 0
        assert not result["changed"]
        assert not result["left"]


@pytest.mark.parametrize("training", [slow({}), BF16], ids=str)
def test_evaluation_has_the_weights_that_were_stepped(
    training: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """At any moment, and they are gathered once behind every step or window."""
    plain, sharded = (
        cluster_of(2).run(evaluated, folder=str(tmp_path), helix=helix, training=training)
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
    *(slow(OPTIMIZER, 4, helix, BF16) for helix in ({}, {"tp_size": 2})),
    *(slow(PARAMETERS, *case) for case in ((2, {}, BF16), (4, {}, {}), (4, {"tp_size": 2}, BF16))),
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


@pytest.mark.parametrize("training", [slow({}), BF16], ids=str)
def test_the_memory_of_a_window(training: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    """Beside what a window takes that keeps its gradients all the time: the gradients, those that are being summed once
    more, and the summed parts. With bf16, products need no copies of the weights."""
    job = {"folder": str(tmp_path), "model": {"num_hidden_layers": 6}, "training": training}
    whole = cluster_of(2).run(peaks, helix={}, **job)
    for mine, other in zip(cluster_of(2).run(peaks, helix=OPTIMIZER, **job), whole, strict=True):
        everything, largest = 4 * sum(mine["flats"]), 4 * max(mine["flats"])
        halves = sum(2 * length for size, length in zip(mine["sizes"], mine["flats"], strict=True) if size == 2)
        assert bool(halves) == bool(training)
        assert mine["forward"] <= other["forward"] - 0.9 * halves
        assert mine["window"] <= other["window"] + everything * 3 / 2 + 2 * largest - 0.9 * halves


@pytest.mark.parametrize("ranks", [2, slow(4)])
@pytest.mark.parametrize("training", [{}, BF16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_window_sends_once_at_its_end(
    ranks: int, training: dict[str, Any], count: int, cluster_of: Any, tmp_path: Path
) -> None:
    """However many micro-batches it has: every gradient to the rank that steps it, and every weight from there."""
    job = {"folder": str(tmp_path), "sharded": OPTIMIZER, "training": training, "count": count}
    for result in cluster_of(ranks).run(sent, **job):
        d = result["ranks"]
        assert d == ranks
        assert result["summed"] == sum(4 * length * (d - 1) // d for _, length, _ in result["flats"])
        assert result["sent"] == sum((4 + size) * length * (d - 1) // d for _, length, size in result["flats"])
        assert [name for name, _ in result["moved"]] == ["all_gather"] * len(result["flats"]) + ["exchange"] * len(
            result["flats"]
        )


@pytest.mark.parametrize("ranks", [2, slow(4)])
@pytest.mark.parametrize(("training", "count"), [(BF16, 2), slow({}, 2)], ids=str)
@pytest.mark.parametrize("sharded", [PARAMETERS, OFTEN], ids=["once", "often"])
def test_what_a_window_sends_for_every_micro_batch(
    ranks: int, training: dict[str, Any], count: int, sharded: dict[str, Any], cluster_of: Any, tmp_path: Path
) -> None:
    """Every gradient once, or once for each micro-batch, in fp32; for each micro-batch weights forward and again in
    backward, but for those of the first unit, whose backward reads none, and of the last one, which keeps them: what
    products read in bfloat16."""
    job = {"folder": str(tmp_path), "sharded": sharded, "training": training, "count": count}
    for result in cluster_of(ranks).run(sent, **job):
        d = result["ranks"]
        assert d == ranks
        layers = [size * length for places, length, size in result["flats"] if not {0, result["last"]} & set(places)]
        everything = sum(size * length for _, length, size in result["flats"])
        weights = count * (everything + sum(layers)) * (d - 1) // d
        times = count if sharded is OFTEN else 1
        gradients = times * sum(4 * length for _, length, _ in result["flats"]) * (d - 1) // d
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
