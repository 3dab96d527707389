"""Step time of HelixTrainer against the stock Trainer, on one process: what the library costs where it cannot help.

Measured: the wall-clock time of whole optimizer steps, from the end of one step to the end of the next (collecting
the batches, forward, backward, clipping, optimizer), of `HelixTrainer(helix_config=HelixConfig(tp_size=1))` and of
`transformers.Trainer`, on copies of one Llama with the same data, in fp32 on the CPU.

How: both trainers live in one process and train in turn, a few steps each round; who goes first changes from round to
round, so that neither a drifting clock nor a busy machine favours one. A round gives one median per trainer, and their
ratio; the table shows the median over rounds, and the spread of the ratio over them. The first rounds are warm-up, and
so is the first step of every round (there is no step before it to count from). The losses are compared as well, because
a faster trainer that learns something else would be worth nothing.

    python -m benchmarks.one_process
    python -m benchmarks.one_process --hidden_size 64 --json result.json
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benchmarks.common import add_outputs, columns, facts, llama, options_of, save
from hf_helix import HelixConfig, HelixTrainer

TARGET = 1.10
"""HelixTrainer may take this many times the stock Trainer's step time."""

STOCK, HELIX = "transformers.Trainer", "HelixTrainer"


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        trainers = make_trainers(options, folder)
        rounds = [run_round(trainers, number) for number in range(options.warmup_rounds + options.rounds)]
    result = summarise(rounds, options)
    text = describe(result)
    print(text)
    print("\n".join(f"{name}: {value}" for name, value in facts().items()))
    save(options, "One process", __doc__, text, result)


def parse_arguments() -> argparse.Namespace:
    model = {"hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocab_size": 4096, "sequence_length": 256}
    batch = {"micro_batch": 2, "accumulation": 4, "optimizer": "adamw_torch_fused", "plan": "auto"}
    parser = options_of(__doc__, **model, **batch, rounds=12, warmup_rounds=2, steps=4, threads=1)
    parser.add_argument("--intermediate_size", type=int, help="default: 2.75 times the hidden size")
    add_outputs(parser)
    options = parser.parse_args()
    if options.intermediate_size is None:
        options.intermediate_size = options.hidden_size * 11 // 4
    return options


# -- what is measured --------------------------------------------------------------------------------------------


class RandomTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples that depend on nothing but their number; every token is a target."""

    def __init__(self, num_samples: int, length: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (num_samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


class StepTimer(TrainerCallback):
    """Seconds from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seconds, self._last = [], None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def make_trainers(options: argparse.Namespace, folder: str) -> dict[str, Trainer]:
    """Both trainers, on copies of one model."""
    model = make_model(options)
    models = {STOCK: copy.deepcopy(model), HELIX: model}
    trainers = {name: make_trainer(name, model, options, folder, use_cpu=True) for name, model in models.items()}
    for trainer in trainers.values():
        trainer.add_callback(StepTimer())
    return trainers


def make_trainer(
    name: str,
    model: LlamaForCausalLM,
    options: argparse.Namespace,
    folder: str,
    helix: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> Trainer:
    """One trainer, with data.

    Args:
        name: `STOCK` or `HELIX`.
        helix: options of `HelixConfig`, besides the plan.
        arguments: of `TrainingArguments`, besides those that `options` stand for.
    """
    args = make_training_arguments(options, folder, **arguments)
    samples = options.micro_batch * options.accumulation * args.max_steps
    given: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": RandomTokens(samples, options.sequence_length, options.vocab_size),
    }
    if name == STOCK:
        trainer = Trainer(**given)
    else:
        trainer = HelixTrainer(**given, helix_config=HelixConfig(tp_size=1, plan=options.plan, **helix))
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    more = {"intermediate_size": options.intermediate_size, "num_key_value_heads": options.kv_heads}
    more["max_position_embeddings"] = options.sequence_length
    return LlamaForCausalLM(llama(options.hidden_size, options.layers, options.vocab_size, options.heads, **more))


def make_training_arguments(options: argparse.Namespace, folder: str, **arguments: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=options.steps + 1,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.accumulation,
        optim=options.optimizer,
        learning_rate=1e-4,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )


# -- measuring ---------------------------------------------------------------------------------------------------


def run_round(trainers: dict[str, Trainer], number: int) -> dict[str, dict[str, float]]:
    """Some steps of each trainer, the other one first every time; their median step time and mean loss."""
    names = list(trainers) if number % 2 == 0 else list(reversed(trainers))
    return {name: run_steps(trainers[name]) for name in names}


def run_steps(trainer: Trainer) -> dict[str, float]:
    loss = trainer.train().training_loss
    timer = next(each for each in trainer.callback_handler.callbacks if isinstance(each, StepTimer))
    return {"seconds": statistics.median(timer.seconds), "loss": loss}


def summarise(rounds: list[dict[str, dict[str, float]]], options: argparse.Namespace) -> dict[str, Any]:
    counted = rounds[options.warmup_rounds :]
    ratios = [each[HELIX]["seconds"] / each[STOCK]["seconds"] for each in counted]
    return {
        "seconds": {name: statistics.median(each[name]["seconds"] for each in counted) for name in (STOCK, HELIX)},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "largest_loss_difference": max(abs(each[HELIX]["loss"] - each[STOCK]["loss"]) for each in rounds),
        "rounds": rounds,
        "options": {name: value for name, value in vars(options).items() if name not in ("json", "markdown")},
    }


def describe(result: dict[str, Any]) -> str:
    options, ratio = result["options"], result["ratio"]
    rows = [(name, f"{seconds * 1e3:.1f}") for name, seconds in result["seconds"].items()]
    verdict = "met" if ratio["median"] <= TARGET else "missed"
    lines = [
        f"Llama: hidden {options['hidden_size']}, {options['layers']} layers, vocabulary {options['vocab_size']}, "
        f"sequence {options['sequence_length']}; {options['accumulation']} micro-batches of {options['micro_batch']}; "
        f"fp32, {options['optimizer']}",
        f"{options['rounds']} rounds of {options['steps']} steps each, in turn",
        columns(("trainer", "median step ms"), rows),
        f"ratio over rounds: median {ratio['median']:.3f}, min {ratio['min']:.3f}, max {ratio['max']:.3f}",
        f"target: at most {TARGET:.2f}, {verdict}",
        f"largest difference between the mean losses of a round: {result['largest_loss_difference']:.1e}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
