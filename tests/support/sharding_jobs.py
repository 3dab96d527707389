"""What processes run whose data-parallel ranks share parameters or the optimizer. Every function returns plain data.

`sharded` are the options that are tested: `shard_optimizer` or `shard_parameters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support import jobs
from support.at_once import collectives_at_once
from support.pipeline_jobs import make, runner_of, window_of
from support.tuning_jobs import hasty

from hf_helix.measure.memory import LiveBytes
from hf_helix.measure.operators import measure_profile
from hf_helix.measure.overlap import bytes_spared, bytes_summed, transports
from hf_helix.operators.communication.transport import Recorder
from hf_helix.operators.zero.zero1 import zero1_flat_parameters
from hf_helix.planning.window.layout import named_gathers
from hf_helix.runtime.divided import plain_parameters

LENGTHS = (33, 16, 21)


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
    whole = make(folder, {**helix, "plan": "sequential"}, model, training, freeze)
    whole.model.train()
    expected = [loss.item() for loss in whole.helix.runner.train_window(window_of(whole, 3, 2, LENGTHS))]
    gradients = {name: parameter.grad for name, parameter in whole.model.named_parameters()}
    norm = whole.helix.gradient_norm().item()
    whole.helix.close()
    trainer = make(folder, {**helix, **sharded, "plan": "sequential"}, model, training, freeze)
    trainer.model.train()
    stage = trainer.helix.runner.stage
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    flats = {parameter: flat for flat in stage.flat_parameters for parameter in flat.placements}
    result: dict[str, Any] = {"expected": expected, "norm": norm, "plans": {}, "shards": len(stage.shards)}
    for plan in plans:
        with hasty():
            runner = runner_of(trainer, plan, "folded_1f1b")
        losses = [loss.item() for loss in runner.train_window(window_of(trainer, 3, 2, LENGTHS))]
        differing, errors, bits = [], [0.0], {}
        for parameter in stage.placements:
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
        assert all(shard.grad is None for shard in stage.shards.values())
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
    stage, optimizer = trainer.helix.runner.stage, trainer.create_optimizer()
    kept = [*stage.placements, *stage.stepped, *(flat.buffer for flat in zero1_flat_parameters(stage.flat_parameters))]
    start = bytes_of(kept)
    trainer.helix.runner.train_window(window_of(trainer, 3, 2, (33,)))
    gradients = [parameter.grad for parameter in kept if parameter.is_leaf and parameter.grad is not None]
    after = bytes_of([*kept, *gradients])
    optimizer.step()
    forget_gradients(trainer)
    averages = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    stepped = bytes_of([*kept, *averages])
    flats = [(flat.length, flat.gather_axis.size) for flat in stage.flat_parameters]
    pieces = [flat.buffer.element_size() for flat in zero1_flat_parameters(stage.flat_parameters)]
    elements = sum(parameter.numel() for parameter in stage.stepped)
    spared = sum(map(bytes_spared, stage.flat_parameters))
    trainer.helix.close()
    return {"bytes": (start, after, stepped), "flats": flats, "pieces": pieces, "elements": elements, "spared": spared}


def forget_gradients(trainer: Any) -> None:
    """Does to what this rank steps what `zero_grad` does."""
    for parameter in trainer.helix.runner.stage.stepped:
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
    flats = runner.stage.flat_parameters
    if flats:
        forget_gradients(trainer)
    else:
        trainer.model.zero_grad(set_to_none=False)
    kept = [t for p in runner.stage.stepped for t in (p, p.grad) if t is not None]
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
    bits = [parameter.detach().clone() for parameter in trainer.helix.runner.stage.stepped]
    overlap, memory = trainer.helix.measure_overlap(repeats=1), trainer.helix.measure_memory()
    trainer.helix.trace(f"{folder}/trace.json")
    stepped = trainer.helix.runner.stage.stepped
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
    stepped = runner.stage.stepped
    bits = [parameter.detach().clone() for parameter in stepped]
    profile = measure_profile(runner, window, pairs=False)
    names = [name for name, _ in named_gathers(runner.layout)]
    pieces = [
        runner.stage.model[gather.units[0]].flat_parameters[gather.name].buffer.nbytes
        for gather in runner.layout.gathers
    ]
    ranks = runner.stage.flat_parameters[0].gather_axis.size
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
    runner, first = trainer.helix.runner, trainer.helix.runner.stage.flat_parameters[0]
    axes = list(dict.fromkeys((first.gather_axis, first.reduce_axis)))
    recorders = [Recorder(axis.transport) for axis in axes]
    with transports(axes, recorders):
        runner.train_window(window_of(trainer, count, 2, (17,)))
    moves = [move for recorder in recorders for move in recorder.moved]
    flats = [
        (
            [place for place, unit in runner.stage.units.items() if flat in unit.flat_parameters.values()],
            flat.length,
            (flat.cast_to or flat.shard.dtype).itemsize,
        )
        for flat in runner.stage.flat_parameters
    ]
    trainer.helix.close()
    return {
        "sent": sum(recorder.bytes_sent for recorder in recorders),
        "summed": bytes_summed(runner),
        "gathered": recorders[0].bytes_sent,
        "moved": [(move.name, move.value[0].numel() * move.value[1].itemsize) for move in moves],
        "flats": flats,
        "last": max(runner.stage.units),
        "ranks": first.gather_axis.size,
    }


@plain_parameters()
def evaluated(folder: str, helix: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """Losses of one batch before the first step and behind every step, twice each; how often weights were gathered for
    each; and of a window that follows."""
    trainer = make(folder, {**helix, "plan": "sequential"}, {}, training)
    runner, optimizer = trainer.helix.runner, trainer.create_optimizer()
    (batch,), window = window_of(trainer, 1, 2, (17,)), window_of(trainer, 2, 2, LENGTHS)
    flats = list(zero1_flat_parameters(runner.stage.flat_parameters))
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
    refused = []
    for use in (lambda: model(ids),):
        try:
            use()
        except RuntimeError as error:
            refused.append(str(error))
    with trainer.helix.full_weights() as whole:
        assert whole is model
        model.eval()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
        assert model.state_dict().keys()
        for use in (trainer.evaluate, lambda: trainer.save_model(folder), trainer.helix.full_weights().__enter__):
            try:
                use()
            except RuntimeError as error:
                refused.append(str(error))
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
