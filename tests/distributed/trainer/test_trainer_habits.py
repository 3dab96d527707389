"""What users do with the stock Trainer they can do with HelixTrainer, and see the same; or it is refused by name.

The habits are those of Transformers' own tests of its Trainer, on a tiny Llama of one layer: docs/trainer.md. A
habit is given what makes trainers, stock or Helix, and returns plain data that must be the same for both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import is_close, plain
from support.derived_models import HOME
from support.jobs import Recorder, Stream
from support.marks import slow
from support.models import arguments, padded, sequences, tiny, word_tokenizer
from support.paths import ROOT
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, default_data_collator, logging

from hf_helix import HelixConfig, HelixTrainer

HABITS: dict[str, Callable[[Make], Any]] = {}
PARTIAL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": -1}


class Make:
    """Makes the trainers of a habit: `make(max_steps=2, rows=5)` takes arguments of the training.

    Args:
        folder: what is written goes there.
        helix: options of `HelixConfig`; None for the stock Trainer.
        sizes: of the model, see `tiny`.
    """

    def __init__(self, folder: Path, helix: dict[str, Any] | None, sizes: dict[str, Any]) -> None:
        self.folder, self.helix, self.sizes = folder, helix, sizes

    def model(self) -> Any:
        return tiny(**{"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, **self.sizes})

    def args(self, **changes: Any) -> Any:
        return arguments(str(self.folder), **{"max_steps": 2, **changes})

    def trainer(self, args: Any, kind: type | None = None, **options: Any) -> Any:
        """`kind` makes the class from the trainer's."""
        base = Trainer if self.helix is None else HelixTrainer
        made = type("Mine", (kind, base), {}) if kind else base
        if "model_init" not in options:
            options.setdefault("model", self.model())
        if self.helix is not None:
            options.setdefault("helix_config", HelixConfig(**self.helix))
        return made(args=args, **options)

    def __call__(self, kind: type | None = None, rows: int = 7, options: Any = None, **changes: Any) -> Any:
        data = {"train_dataset": sequences(rows), "eval_dataset": sequences(3, seed=9)}
        return self.trainer(self.args(**changes), kind, **{**data, **(options or {})})


def habit(run: Callable[[Make], Any]) -> Callable[[Make], Any]:
    HABITS[run.__name__] = run
    return run


def habits(**cases: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Habits of one kind: what differs from one to the other, by their names."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        HABITS.update({name: functools.partial(run, **case) for name, case in cases.items()})
        return run

    return register


def run_habits(folder: str, helix: dict[str, Any] | None, names: list[str], **sizes: Any) -> dict[str, Any]:
    """What every habit gives, or the error it ends with."""
    result: dict[str, Any] = {}
    for name in names:
        here = Path(folder) / name
        try:
            result[name] = plain(HABITS[name](Make(here, helix, sizes)))
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    return result


def trained(trainer: Any) -> Any:
    """What a run logs."""
    output = trainer.train()
    return trainer.state.log_history, output.metrics, trainer.state.epoch, trainer.state.max_steps


def accuracy(result: Any) -> dict[str, float]:
    """The part of the tokens that are right, and how many samples there are."""
    parts = [result.predictions], [result.label_ids]
    if isinstance(result.predictions, list):
        parts = result.predictions, result.label_ids
    right = [(logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean() for logits, labels in zip(*parts, strict=True)]
    return {"accuracy": sum(right) / len(right), "samples": sum(map(len, parts[0]))}


class Accuracy:
    """Metrics of all predictions at once, or batch by batch."""

    def __init__(self) -> None:
        self.right = self.all = self.rows = 0

    def __call__(self, result: Any, compute_result: bool = True) -> dict[str, float]:
        predictions, labels = (torch.as_tensor(value) for value in (result.predictions, result.label_ids))
        counted = labels != -100
        self.right += int((predictions == labels)[counted].sum())
        self.all += int(counted.sum())
        self.rows += len(labels)
        if not compute_result:
            return {}
        metrics = {"accuracy": self.right / self.all, "rows": self.rows}
        self.__init__()  # type: ignore[misc]
        for name in ("inputs", "losses"):
            value = getattr(result, name, None)
            if value is not None and not isinstance(value, dict):
                metrics[name] = float(torch.as_tensor(value).double().sum())
        return metrics


class ChangesInputs:
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**inputs, "labels": inputs["labels"].roll(1, 0)}
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class WritesInputs:
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["labels"][:, :3] = -100
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class ChangesSamples:
    def get_batch_samples(self, *args: Any) -> Any:
        samples, count = super().get_batch_samples(*args)  # type: ignore[misc]
        return [dict(sample, input_ids=sample["input_ids"].roll(1, 0)) for sample in samples], count


class ChangesLosses:
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", ()), super().training_step(*args, **kwargs)]  # type: ignore[misc]
        return self.seen[-1] * 2


class StepsItself:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)  # type: ignore[attr-defined]
        self.accelerator.backward(loss)  # type: ignore[attr-defined]
        return loss.detach()


class Loses:
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss


class Wraps:
    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model


@habits(
    no_clipping={"max_grad_norm": 0},
    a_part_of_an_epoch={"num_train_epochs": 1.5, **PARTIAL},
    # Neither the last batch nor the last window is full.
    windows_of_several_lengths={
        "options": {"train_dataset": sequences(9, lengths=(5, 11, 8)), "data_collator": padded},
        "num_train_epochs": 2,
        **PARTIAL,
    },
    logs_of_an_epoch={
        "logging_first_step": True,
        "logging_strategy": "epoch",
        "eval_strategy": "epoch",
        "eval_delay": 1,
        "num_train_epochs": 2,
        "rows": 5,
        **PARTIAL,
    },
    workers={"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_drop_last": True},
    # `max_steps` wins over epochs, and goes through the data more than once.
    steps_by_the_bound={"rows": 3, "max_steps": 5, "num_train_epochs": 1},
    no_training_data={"options": {"train_dataset": None}},
    a_stream_without_steps={"options": {"train_dataset": Stream(sequences(4))}, "max_steps": -1},
    a_stream_that_ends={"options": {"train_dataset": Stream(sequences(4))}, "max_steps": 3},
    trained_twice={"times": 2},
    batches_of_windows_changed={"kind": ChangesInputs, "gradient_accumulation_steps": 2},
    batches_of_windows_written={"kind": WritesInputs, "gradient_accumulation_steps": 2},
    batches_of_windows_changed_when_fetched={"kind": ChangesSamples, "gradient_accumulation_steps": 2},
    steps_of_ones_own={"kind": StepsItself},
    a_loss_of_ones_own={"kind": Loses},
    a_loss_assigned={"assigned": {"compute_loss": lambda model, inputs, *args, **kwargs: model(**inputs).loss}},
    a_loss_function_assigned={"assigned": {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.mean()}},
    a_model_wrapped={"kind": Wraps},
    means_of_micro_batches={"assigned": {"model_accepts_loss_kwargs": False}, "gradient_accumulation_steps": 2},
)
def trains(make: Make, assigned: dict[str, Any] | None = None, times: int = 1, **changes: Any) -> Any:
    trainer = make(**changes)
    for name, value in (assigned or {}).items():
        setattr(trainer, name, value)
    return [trained(trainer) for _ in range(times)]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "states": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "none yet": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
}


@habits(
    smoothed_labels={"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2, **EVALUATED},
    early_stopping={
        **EVALUATED,
        "max_steps": 40,
        "learning_rate": 0.01,
        "metric_for_best_model": "loss",
        "save_strategy": "best",
        "save_only_model": True,
        "save_total_limit": 2,
        "patience": 1,
    },
    a_rate_that_follows_evaluations={
        **EVALUATED,
        "eval_steps": 1,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
    },
    an_optimizer_passed_in={"optimizer": "none yet", "max_steps": 4},
    an_optimizer_with_states={"optimizer": "states", "max_steps": 4},
    a_class_of_optimizers={"optimizer_cls_and_kwargs": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-6}), "max_steps": 4},
    adafactor={"optim": "adafactor", "max_steps": 4},
    grouped_by_length={
        "train_sampling_strategy": "group_by_length",
        "num_train_epochs": 2,
        "max_steps": -1,
        "lengths": (17, 5, 11, 8, 14),
    },
    rebalanced_by_length={
        "train_sampling_strategy": "batch_rebalance",
        "num_train_epochs": 1,
        "max_steps": -1,
        "lengths": (17, 5, 11, 8, 14),
    },
    metrics_of_everything={
        **EVALUATED,
        "eval_on_start": True,
        "eval_accumulation_steps": 1,
        "include_for_metrics": ["inputs", "loss"],
        "include_num_input_tokens_seen": "non_padding",
        "measured": True,
        "lengths": (9, 17),
    },
    metrics_batch_by_batch={**EVALUATED, "batch_eval_metrics": True, "measured": True},
    batches_split={**EVALUATED, "accelerator_config": {"split_batches": True}},
    a_stream_read_by_all={"max_steps": 4, "accelerator_config": {"dispatch_batches": False}, "stream": True},
    all_tokens_counted={"max_steps": 4, "include_num_input_tokens_seen": "all", "lengths": (17, 9)},
)
def follows(
    make: Make,
    patience: int = 0,
    optimizer: str = "",
    stream: bool = False,
    measured: bool = False,
    lengths: tuple[int, ...] = (17,),
    optimizer_cls_and_kwargs: Any = None,
    **changes: Any,
) -> Any:
    """The log, the events, and the checkpoints that are left."""
    recorder, rows, model = Recorder(), sequences(24, lengths=lengths), make.model()
    options: dict[str, Any] = {
        "model": model,
        "train_dataset": Stream(rows) if stream else rows,
        "eval_dataset": sequences(5, lengths=lengths, seed=9),
        "data_collator": padded,
        "callbacks": [recorder, *([EarlyStoppingCallback(patience)] if patience else [])],
        "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
    }
    if optimizer:
        given = OPTIMIZERS[optimizer](model)
        options["optimizers"] = given, torch.optim.lr_scheduler.ExponentialLR(given, 0.9)
    if measured:
        options["compute_metrics"] = Accuracy()
        options["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1).roll(1, 1)
    trainer = make(options=options, **changes)
    state = trained(trainer), trainer.state.best_global_step, trainer.state.num_input_tokens_seen
    return state, recorder.events, sorted(path.name for path in make.folder.glob("checkpoint-*"))


# -- the loop ------------------------------------------------------------------------------------------------------


@habits(
    control_evaluate_log={"should_evaluate": 1, "should_log": 2, "should_save": 3},
    control_stop_training={"should_training_stop": 3},
    control_stop_epoch={"should_epoch_stop": 2},
)
def controlled(make: Make, **flags: int) -> Any:
    """A callback sets flags at steps."""

    class Sets(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            for flag in (flag for flag, step in flags.items() if step == state.global_step):
                setattr(control, flag, True)

    recorder = Recorder()
    return trained(make(options={"callbacks": [Sets(), recorder]}, max_steps=4, logging_steps=100)), recorder.events


@habit
def stopped_inside_a_window(make: Make) -> Any:
    """And trained again, by the whole run and by hand."""

    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
            control.should_training_stop = state.global_step == 1
            return control

    trainer = make(options={"callbacks": [Stop()]}, gradient_accumulation_steps=2, rows=12, max_steps=3)
    first = trained(trainer)
    trainer.remove_callback(Stop)
    trainer.model.zero_grad()
    return first[1]["train_loss"], trained(trainer)[1]["train_loss"]


@habit
def seeds_of_data(make: Make) -> Any:
    return [trained(make(data_seed=seed, seed=5, max_steps=2))[0] for seed in (1, 2)]


@habit
def a_model_made_anew(make: Make) -> Any:
    trainer = make(options={"model_init": make.model})
    return trained(trainer), trained(trainer)


@habit
def a_trial_by_hand(make: Make) -> Any:
    seen = []

    def init(trial: Any) -> Any:
        seen.append(trial)
        return make.model()

    trainer = make(options={"model_init": init})
    trainer.train(trial={"learning_rate": 0.1})
    return trainer.state.log_history, seen


@habit
def after_an_exception(make: Make) -> Any:
    class Fails(TrainerCallback):
        def on_step_end(self, *args: Any, **given: Any) -> None:
            raise KeyError("mine")

    trainer = make(options={"callbacks": [Fails()]})
    with contextlib.suppress(KeyError):
        trainer.train()
    return trained(make())


@habit
def windows_longer_than_the_data(make: Make) -> Any:
    """A step is a whole epoch then; `get_batch_samples` is assigned to see what it gives."""

    def watched(trainer: Any) -> Any:
        stock, seen = trainer.get_batch_samples, []

        def get_batch_samples(*args: Any) -> Any:
            samples, count = stock(*args)
            seen.append((len(samples), count))
            return samples, count

        trainer.get_batch_samples = get_batch_samples
        return trained(trainer), seen

    return [watched(make(gradient_accumulation_steps=5, num_train_epochs=2, max_steps=steps)) for steps in (3, -1)]


@habit
def events_of_callbacks(make: Make) -> Any:
    """Of two epochs with evaluations and checkpoints, and of predictions."""
    recorder = Recorder()
    every = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    trainer = make(options={"callbacks": [recorder]}, rows=5, num_train_epochs=2, max_steps=-1, **every)
    trainer.train()
    trainer.predict(sequences(2))
    return recorder.events


# -- data ----------------------------------------------------------------------------------------------------------


@habit
def loaders_of_ones_own(make: Make) -> Any:
    """Lists of batches, which have no data set."""

    class Mine:
        def get_train_dataloader(self) -> Any:
            return [padded(sequences(2, seed=seed)) for seed in range(3)]

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return [padded(sequences(2, seed=4)), padded(sequences(1, seed=5))]

    trainer = make(kind=Mine, options={"compute_metrics": accuracy}, max_steps=4)
    return trained(trainer), trainer.evaluate()


# -- evaluation ----------------------------------------------------------------------------------------------------


@habit
def a_stream_evaluated(make: Make) -> Any:
    """Of which the last batch is not full, handed out by rank 0 or read by all."""
    result = []
    for dispatch in (None, False):
        stream = Stream(sequences(5, seed=9))
        options = {"eval_dataset": stream, "compute_metrics": accuracy}
        trainer = make(options=options, accelerator_config={"dispatch_batches": dispatch})
        output = trainer.predict(stream)
        result.append((trainer.evaluate(), output.metrics, output.predictions.shape, output.label_ids))
    return result


@habit
def several_sets(make: Make) -> Any:
    sets = {"one": sequences(3, seed=9), "two": sequences(2, seed=8)}
    trainer = make(options={"eval_dataset": sets}, eval_strategy="steps", eval_steps=1)
    return trained(trainer), trainer.evaluate(sequences(1, seed=7), metric_key_prefix="other")


@habit
def predictions(make: Make) -> Any:
    trainer = make(options={"compute_metrics": accuracy}, eval_do_concat_batches=False)
    output = trainer.predict(sequences(3, seed=6), metric_key_prefix="mine")
    return [part.shape for part in output.predictions], [part.shape for part in output.label_ids], output.metrics


@habit
def predictions_without_labels(make: Make) -> Any:
    rows = [{"input_ids": row["input_ids"]} for row in sequences(3, seed=6)]
    output = make().predict(rows)
    return output.predictions.shape, float(output.predictions.mean()), output.label_ids, output.metrics


LOGITS, HIDDEN = ["logits", "cache", "past_key_values"], ["hidden_states", "cache", "past_key_values"]


@habits(
    predictions_of_losses_only={"prediction_loss_only": True},
    logits_left_out={"ignore_keys": LOGITS},
    hidden_states={"hidden": True},
    hidden_states_left_out={"hidden": True, "ignore_keys": HIDDEN},
)
def predicts(make: Make, hidden: bool = False, ignore_keys: list[str] | None = None, **changes: Any) -> Any:
    trainer = make(**changes)
    trainer.model.config.output_hidden_states = hidden
    output = trainer.predict(sequences(3, seed=6), ignore_keys=ignore_keys)
    return output.predictions, output.label_ids, output.metrics


@habit
def hidden_states_for_metrics(make: Make) -> Any:
    """Known when training begins."""
    metrics = {"compute_metrics": lambda result: {"parts": len(result.predictions)}}
    trainer = make(options=metrics, eval_strategy="epoch")
    trainer.model.config.output_hidden_states = True
    return trained(trainer)


@habit
def no_evaluation_data(make: Make) -> Any:
    return make(options={"eval_dataset": None}).evaluate()


# -- by hand -------------------------------------------------------------------------------------------------------


def norm(trainer: Any) -> float:
    if isinstance(trainer, HelixTrainer):
        return float(trainer.helix.gradient_norm())
    return float(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]))


def batch_of(seed: int) -> Any:
    return padded(sequences(2, seed=seed))


@habit
def steps_by_hand(make: Make) -> Any:
    """Before a run and after it, whose gradients add up; the last without a number of tokens."""
    trainer, result = make(gradient_accumulation_steps=2), []
    counts = [torch.tensor(30), torch.tensor(31)]
    for seed, count in enumerate(counts):
        result += [trainer.training_step(trainer.model, batch_of(seed), count), norm(trainer)]
    result.append(trained(trainer))
    trainer.model.zero_grad()
    for seed in range(2):
        result += [trainer.training_step(trainer.model, batch_of(seed)), norm(trainer)]
    return result


@habit
def predictions_by_hand(make: Make) -> Any:
    trainer = make()
    trainer.model.eval()
    result = [trainer.prediction_step(trainer.model, batch_of(1), only) for only in (True, False)]
    return [[None if value is None else value.float().mean() for value in row] for row in result]


@habit
def losses_by_hand(make: Make) -> Any:
    trainer = make()
    return trainer.compute_loss(trainer.model, batch_of(1)).detach()


@habit
def losses_watched_and_changed(make: Make) -> Any:
    trainer = make(kind=ChangesLosses, rows=12, gradient_accumulation_steps=3)
    return trained(trainer), trainer.seen


@habit
def predictions_changed(make: Make) -> Any:
    class Mine:
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
            return loss * 2, logits, labels

    return make(kind=Mine).evaluate()


@habit
def batches_changed(make: Make) -> Any:
    return [trained(make(kind=kind))[1]["train_loss"] for kind in (ChangesInputs, WritesInputs, ChangesSamples)]


@habit
def another_model_assigned(make: Make) -> Any:
    trainer = make()
    trainer.model = trainer.model_wrapped = make.model()
    return trainer.evaluate()


# -- what a trainer says of itself -----------------------------------------------------------------------------------


@habit
def counts(make: Make) -> Any:
    trainer = make()
    batch = batch_of(0)
    before = trainer.state.total_flos
    return [
        trainer.get_num_trainable_parameters(),
        trainer.model.num_parameters(),
        trainer.model.num_parameters(exclude_embeddings=True),
        trainer.model.num_parameters(only_trainable=True),
        trainer.floating_point_ops(batch),
        trainer.get_total_train_batch_size(trainer.args),
        trainer.num_examples(trainer.get_train_dataloader()),
        before,
        trained(trainer)[1]["train_loss"],
        trainer.state.total_flos,
    ]


@habit
def counts_of_frozen_models(make: Make) -> Any:
    model = make.model()
    model.model.embed_tokens.requires_grad_(False)
    trainer = make(options={"model": model})
    return trainer.get_num_trainable_parameters(), trainer.model.num_parameters(only_trainable=True)


@habit
def what_the_log_says(make: Make) -> Any:
    lines: list[str] = []
    handler = logging.logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.get_logger("transformers.trainer")
    logger.addHandler(handler)
    try:
        make(log_level="info", log_level_replica="info").train()
    finally:
        logger.removeHandler(handler)
        logging.set_verbosity_warning()
    return [line for line in lines if "Num" in line or "Total" in line or "parameters" in line]


@habit
def groups_of_the_optimizer(make: Make) -> Any:
    trainer = make()
    trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group] for group in trainer.get_optimizer_group()]
    return sorted(trainer.get_decay_parameter_names(trainer.model)), trainer.get_learning_rates(), groups


@habit
def the_state_saved(make: Make) -> Any:
    trainer = make()
    trainer.train()
    trainer.log({"mine": 1.0})
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return trainer.state.global_step, trainer.state.log_history
    read = TrainerState.load_from_json(str(make.folder / "trainer_state.json"))
    return read.global_step, read.log_history


@habit
def arguments_left_alone(make: Make) -> Any:
    """The trainer's are the user's; what is saved is what was given; another trainer takes them."""
    args = make.args()
    given = args.to_dict()
    data = {"train_dataset": sequences(7), "eval_dataset": sequences(3, seed=9)}
    trainer = make.trainer(args, **data)
    first = trained(trainer)
    trainer.save_model()
    if args.should_save:
        assert torch.load(make.folder / "training_args.bin", weights_only=False).to_dict() == given
    assert trainer.args is args
    assert args.to_dict() == given == json.loads(args.to_json_string())
    second = make.trainer(args, **data)
    if make.helix is None:
        return first, trained(second), trainer.evaluate()
    with_another = make.trainer(args, **data, helix_config=HelixConfig(plan="sequential", tp_size=1))
    assert with_another.accelerator.parallelism_config.config.tp_size == 1
    assert trainer.accelerator.parallelism_config.config.tp_size == make.helix.get("tp_size", 1)
    assert Trainer(make.model(), args).accelerator.parallelism_config is None
    return first, trained(second), trainer.evaluate()


@habit
def going_on_for_longer(make: Make) -> Any:
    make(save_strategy="steps", save_steps=2, max_steps=2, lr_scheduler_type="constant").train()
    trainer = make(max_steps=4, lr_scheduler_type="constant", ignore_data_skip=True)
    trainer.train(resume_from_checkpoint=True)
    return trainer.state.log_history[-2]["loss"], trainer.state.global_step


@habit
def the_best_checkpoint(make: Make) -> Any:
    """By the user's own scores: kept beyond `save_total_limit`, saved alone, or of a step that is not saved."""

    class Mine:
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super().evaluate(*args, **kwargs)  # type: ignore[misc]
            return {**metrics, "eval_score": 1 / max(self.state.global_step, 1)}  # type: ignore[attr-defined]

    best = {"metric_for_best_model": "score", "eval_strategy": "steps", "eval_steps": 1}
    result = []
    for number, saved in enumerate(
        (
            {"save_steps": 1, "save_total_limit": 1},
            {"save_strategy": "best", "load_best_model_at_end": True},
            {"save_steps": 2, "eval_steps": 3},
        )
    ):
        folder = make.folder / str(number)
        trainer = make(kind=Mine, output_dir=str(folder), max_steps=3, **{"save_strategy": "steps", **best, **saved})
        trainer.train()
        state, names = trainer.state, sorted(path.name for path in folder.glob("checkpoint-*"))
        place = state.best_model_checkpoint and Path(state.best_model_checkpoint).name
        result.append((state.best_metric, state.best_global_step, place, names, trainer.evaluate()))
    return result


@habit
def tokens_of_the_tokenizer(make: Make) -> Any:
    """The model learns its special tokens, its padding is not counted, and it is saved, also from a collator."""
    mine = word_tokenizer()
    mine.add_special_tokens({"eos_token": "<end>", "bos_token": "<start>"})
    rows = sequences(4, lengths=(17, 9), padding="right")
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
    options = {"train_dataset": rows, "processing_class": mine, "data_collator": default_data_collator}
    trainer = make(options=options, include_num_input_tokens_seen="non_padding")
    trainer.train()
    learnt = [
        (config.bos_token_id, config.eos_token_id, config.pad_token_id)
        for config in (trainer.model.config, trainer.model.generation_config)
    ]

    class Collator:
        tokenizer = mine

        def __call__(self, batch: Any) -> Any:
            return padded(batch)

    make(options={"data_collator": Collator()}, save_strategy="steps", save_steps=2).train()
    return learnt, trainer.state.num_input_tokens_seen, sorted(path.name for path in make.folder.rglob("tokenizer*"))


@habit
def frozen_by_hand(make: Make) -> Any:
    """After the trainer is made, and again to go on."""

    def frozen(**changes: Any) -> Any:
        trainer = make(max_steps=3, save_strategy="steps", save_steps=2, **changes)
        trainer.model.model.embed_tokens.weight.requires_grad_(False)
        return trainer

    trainer = frozen()
    first = trained(trainer), trainer.get_num_trainable_parameters()
    trainer = frozen()
    trainer.train(resume_from_checkpoint=str(make.folder / "checkpoint-2"))
    return first, trainer.state.log_history[:-1]


@habit
def an_optimizer_factory(make: Make) -> Any:
    """A class that is no optimizer and makes one from the model."""

    class Factory:
        def __call__(self, opt_model: Any, **options: Any) -> Any:
            return torch.optim.SGD(list(opt_model.parameters()), **options)

    return trained(make(options={"optimizer_cls_and_kwargs": (Factory, {"lr": 0.1})}))


@habit
def steps_of_the_accelerator(make: Make) -> Any:
    """The length of windows is in `accelerator_config`, which is a file."""
    make.folder.mkdir(parents=True, exist_ok=True)
    path = make.folder / "accelerator.json"
    path.write_text(json.dumps({"use_seedable_sampler": False, "gradient_accumulation_kwargs": {"num_steps": 3}}))
    trainer = make(rows=12, accelerator_config=str(path))
    assert make.helix is None or trainer.helix.session.tuner.num_microbatches == 3
    return trained(trainer), trainer.args.gradient_accumulation_steps, trainer.accelerator.use_seedable_sampler


@habits(a_search={"n_trials": 2}, a_search_that_ends_early={"n_trials": 6})  # the sampler knows four trials
def search(make: Make, n_trials: int, model_init: Any = None, **options: Any) -> Any:
    """With checkpoints, and a size of batches that a trial chooses."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make(options={"model_init": model_init or make.model}, **every)
    space = {"learning_rate": [0.1, 0.01], "per_device_train_batch_size": [2, 1]}
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {name: trial.suggest_categorical(name, values) for name, values in space.items()},
        n_trials=n_trials,
        sampler=optuna.samplers.GridSampler(space, seed=1),
        **options,
    )
    folders = sorted(path.relative_to(make.folder).as_posix() for path in make.folder.glob("run-*/checkpoint-*"))
    return folders, None if best is None else (best.run_id, best.objective, best.hyperparameters)


@habit
def a_search_that_prunes(make: Make) -> Any:
    import optuna

    return search(make, n_trials=2, pruner=optuna.pruners.MedianPruner())


@habit
def a_search_whose_model_asks(make: Make) -> Any:
    def model_init(trial: Any) -> Any:
        if trial is not None:
            trial.suggest_categorical("layers", [1])
        return make.model()

    return search(make, n_trials=1, model_init=model_init)


@habit
def a_search_of_two_objectives(make: Make) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    every = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    trainer = make(options={"model_init": make.model, "compute_metrics": accuracy}, **every)
    result = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [0.1, 0.01])},
        hp_name=lambda trial: f"mine {trial.number}",
        direction=["minimize", "maximize"],
        compute_objective=lambda metrics: (metrics["eval_loss"], metrics["eval_accuracy"]),
        n_trials=2,
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    return None if result is None else [(best.run_id, best.objective, best.hyperparameters) for best in result]


@habit
def a_search_of_what_is_refused(make: Make) -> Any:
    trainer = make(options={"model_init": make.model})
    return trainer.hyperparameter_search(hp_space=lambda trial: {"auto_find_batch_size": True}, n_trials=1) is not None


# -- the tests --------------------------------------------------------------------------------------------------------

# What is refused, with words of the error.
REFUSED = {
    "hidden_states": "output_hidden_states=True: predictions would hold hidden_states .* ignore_keys",
    "hidden_states_for_metrics": "output_hidden_states=True: .*ignore_keys_for_eval",
    "batches_of_windows_changed": "change batches in the data collator, or use gradient_accumulation_steps=1",
    "batches_of_windows_written": "change batches in the data collator",
    "batches_of_windows_changed_when_fetched": "change batches in the data collator",
    "steps_of_ones_own": "does not call super|cannot be called directly with gradients; use .*training_step",
    "a_loss_assigned": "compute_loss was assigned after",
    "a_loss_function_assigned": "compute_loss_func was assigned after",
    "a_model_wrapped": "Mine overrides _wrap_model",
    "another_model_assigned": "has replaced the model",
    "a_search_of_what_is_refused": "auto_find_batch_size",
}
# The same, where the model is cut.
REFUSED_CUT = {
    **REFUSED,
    "losses_by_hand": r"cannot be called directly with gradients; use .*trainer\.prediction_step",
    "an_optimizer_factory": "optimizer_cls_and_kwargs=.*Factory.*granularity = 'element'",
    "a_search_whose_model_asks": "model_init asks the trial for layers, and on 2 ranks.*in hp_space",
    "a_search_that_prunes": "pruner=.* on 2 ranks.*leave it out",
}
ONE_PROCESS = {"workers", "rebalanced_by_length"}  # processes of a cluster may have no workers; for several batches
RANK_0 = {
    "a_search",
    "a_search_that_ends_early",
    "a_search_of_two_objectives",
}  # others have no result, as in the stock Trainer
SEARCHES = {name for name in HABITS if name.startswith("a_search")}
QUICK = {
    "loaders_of_ones_own",
    "a_stream_evaluated",
    "logits_left_out",
    "hidden_states",
    "hidden_states_for_metrics",
    "steps_by_hand",
    "losses_by_hand",
    "batches_changed",
    "batches_of_windows_changed",
    "steps_of_ones_own",
    "a_loss_assigned",
    "a_model_wrapped",
    "means_of_micro_batches",
    "another_model_assigned",
    "counts",
    "arguments_left_alone",
    "an_optimizer_passed_in",
    "smoothed_labels",
    "early_stopping",
    "metrics_of_everything",
}


def known(names: set[str]) -> list[str]:
    """In the order of the file, searches only where Optuna is."""
    has_optuna = importlib.util.find_spec("optuna") is not None
    return [name for name in HABITS if name in names and (has_optuna or name not in SEARCHES)]


def differences(result: dict[str, Any], expected: dict[str, Any], refused: dict[str, str]) -> list[str]:
    said = []
    for name, value in expected.items():
        if name in refused:
            if not re.search(refused[name], str(result[name])):
                said.append(f"{name} is not refused: {result[name]}")
        elif not is_close(result[name], value):
            said.append(f"{name}: {result[name]}\n  stock: {value}")
    return said


TP, PP, CP, DP, KEPT = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}, {}, {"shard_optimizer": True}
PASSED = {"an_optimizer_passed_in", "an_optimizer_with_states", "a_class_of_optimizers"}
OVER_BATCHES = {"smoothed_labels", "metrics_of_everything", "rebalanced_by_length", "all_tokens_counted"}
OVER_STAGES = {"smoothed_labels", "a_stream_read_by_all", "all_tokens_counted", "adafactor", *PASSED}


@pytest.mark.parametrize(
    ("helix", "names", "sizes"),
    [
        (TP, QUICK, {}),
        (DP, {"grouped_by_length", "batches_split", "a_stream_read_by_all"}, {}),
        (PP, {"a_model_made_anew"}, {"num_hidden_layers": 4}),
        slow(TP, HABITS.keys() - QUICK - ONE_PROCESS, {}),
        slow(TP, QUICK, {"family": f"{HOME}olmo2"}),
        slow(DP, OVER_BATCHES, {}),
        slow(PP, OVER_STAGES, {"num_hidden_layers": 4}),
        slow(CP, {"smoothed_labels"}, {}),
        slow(KEPT, PASSED, {}),
    ],
    ids=["tp", "dp", "pp", "tp, others", "tp, derived", "dp, others", "pp, others", "cp", "shard_optimizer"],
)
def test_two_ranks(helix: dict[str, Any], names: set[str], sizes: dict[str, Any], cluster_of: Any, tmp_path: Path):
    """Ranks that share a batch behave as one process, and data-parallel ones as under DDP."""
    job = {"names": known(names), **sizes}
    if helix in (DP, KEPT):
        expected = cluster_of(2).run(run_habits, folder=str(tmp_path / "stock"), helix=None, **job)[0]
    else:
        expected = run_habits(str(tmp_path / "stock"), None, **job)
    ranks = cluster_of(2).run(run_habits, folder=str(tmp_path), helix={"plan": "sequential", **helix}, **job)
    for rank, result in enumerate(ranks):
        compared = {name: value for name, value in expected.items() if rank == 0 or name not in RANK_0}
        assert differences(result, compared, REFUSED_CUT if helix == TP else REFUSED) == [], f"rank {rank}"
    if "early_stopping" in names:
        (log, *_), *_ = expected["early_stopping"][0]
        assert max(entry["step"] for entry in log) < 40
        assert expected["early_stopping"][-1], "checkpoints"


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    names = known(set(HABITS))
    expected = run_habits(str(tmp_path / "stock"), None, names)
    result = run_habits(str(tmp_path / "helix"), {"plan": "sequential"}, names)
    assert differences(result, expected, REFUSED) == []


def test_every_habit_has_a_line_in_the_docs() -> None:
    listed = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "trainer.md").read_text().partition("\n## Habits")[2], re.MULTILINE
    )
    assert sorted(listed) == sorted(HABITS)
