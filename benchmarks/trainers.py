"""Trainers beside each other: step times of the stock Trainer and HelixTrainer, of two losses, and the memory of DPO.

Step times are wall-clock, from the end of one optimizer step to the end of the next (batches, forward, backward,
clipping, optimizer), in fp32 on the CPU. Both trainers live in one process and train copies of one Llama on the same
data in turn, some steps each round; who goes first changes from round to round. A round gives one median for each
trainer, and their ratio; the first rounds do not count, nor does the first step of each. Losses are compared, too.
Memory is that of live tensors at the peak of a training step, counted storage by storage; parameters and gradients do
not count. The studies:

    stock   HelixTrainer on one process beside transformers.Trainer: what the library costs where it cannot help
    loss    HelixTrainer with `compute_loss_func`, the next-token loss of Transformers, beside its built-in loss; the
            allocator keeps freed memory, as that of a GPU does: otherwise the kernel maps the logits anew each time
    sft     TRL's SFTTrainer of a mixture under the mixin beside HelixTrainer with its built-in loss; both with the loss
            of routers, of which SFTTrainer takes the mean over micro-batches
    dpo     TRL's DPOTrainer under the mixin beside HelixTrainer with its built-in loss on as many rows; the seconds of
            the reference's forward pass do not count
    generate  tokens of the cut model's own `generate` beside those of the stock model on one process
    memory  a step of TRL's DPOTrainer with its chunked head, under the mixin beside the stock one on one process

    python -m benchmarks.trainers stock
    python -m benchmarks.trainers loss --tp_size 2
    python -m benchmarks.trainers sft --ep_size 2
    python -m benchmarks.trainers dpo --tp_size 2 --plan auto
    python -m benchmarks.trainers generate --tp_size 2 --new_tokens 32
    python -m benchmarks.trainers memory --tp_size 2 --vocabulary 128256
"""

import argparse
import copy
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import (
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import PrinterCallback

from benchmarks.common import add_outputs, columns, facts, llama, options_of, save
from benchmarks.ranks import Ranks
from hf_helix import HelixConfig, HelixTrainer, HelixTrainerMixin

TARGETS = {"stock": 1.10, "loss": 1.03, "sft": 1.03, "dpo": 1.03, "memory": 1.0}
"""At most so many times what stands first in the table."""

STOCK, HELIX = "transformers.Trainer", "HelixTrainer"

STOCK_PEAK = "STOCK_PEAK"
"""The variable with the peak of the stock trainer, which is measured on one process before the ranks start."""

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": 2**30, "MALLOC_TRIM_THRESHOLD_": 2**32, "MALLOC_TOP_PAD_": 2**28}
"""Variables of glibc, in bytes, that a process reads at its start."""


def main() -> None:
    model = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocabulary": 4096, "sequence": 256}
    parser = options_of(
        __doc__,
        **model,
        batch=2,
        accumulation=4,
        tp_size=1,
        ep_size=1,
        pp_size=1,
        plan="greedy",
        new_tokens=32,
        rounds=12,
        warmup_rounds=2,
        steps=4,
    )
    parser.add_argument("study", choices=STUDIES)
    add_outputs(parser)
    options = parser.parse_args()
    options.intermediate = options.hidden * 11 // 4
    if options.study == "stock":
        options.rank = 0
        torch.set_num_threads(1)
        return work(options)
    if options.study == "memory" and "RANK" not in os.environ:
        os.environ[STOCK_PEAK] = str(peak_of_step(stock_dpo(), options))
    os.environ |= {name: str(size) for name, size in KEEPS_MEMORY.items()}
    Ranks(options.tp_size * options.ep_size * options.pp_size).run(work, options)


def work(options: argparse.Namespace) -> None:
    """One rank."""
    transformers.logging.set_verbosity_error()
    text, result = STUDIES[options.study](options)
    if options.rank == 0:
        print("\n".join([text, *(f"{name}: {value}" for name, value in facts().items())]))
        save(options, f"Trainers: {options.study}", __doc__, text, result)


# -- step times ----------------------------------------------------------------------------------------------------


class RandomTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples that depend on nothing but their number; every token is a target."""

    def __init__(self, num_samples: int, length: int, vocabulary: int) -> None:
        self.tokens = torch.randint(vocabulary, (num_samples, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


class StepTimer(TrainerCallback):
    """Seconds from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.aside = [0.0, 0.0]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ends: list[float] = []
        self.used: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter() - self.aside[0])
        self.used.append(time.process_time() - self.aside[1])

    def leave_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function whose seconds do not count."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, used = time.perf_counter(), time.process_time()
            result = function(*args, **kwargs)
            self.aside[0] += time.perf_counter() - start
            self.aside[1] += time.process_time() - used
            return result

        return timed

    @property
    def seconds(self) -> float:
        """The median of a round."""
        return statistics.median(end - start for start, end in itertools.pairwise(self.ends))

    @property
    def cpu_seconds(self) -> float:
        """The median of a round, of this process on its cores: other jobs of the machine hardly change it."""
        return statistics.median(end - start for start, end in itertools.pairwise(self.used))


Maker = Callable[[str], Trainer]
"""Makes a trainer that writes to a folder."""


def make_model(sizes: Any) -> LlamaForCausalLM:
    """Returns the Llama of `sizes`: hidden, intermediate, layers, heads, kv_heads, vocabulary, sequence."""
    torch.manual_seed(0)
    more = {"intermediate_size": sizes.intermediate, "num_key_value_heads": sizes.kv_heads}
    more["max_position_embeddings"] = sizes.sequence
    return LlamaForCausalLM(llama(sizes.hidden, sizes.layers, sizes.vocabulary, sizes.heads, **more))


def make_trainer(
    model: LlamaForCausalLM, sizes: Any, folder: str, helix: HelixConfig | None, loss: Any = None, **arguments: Any
) -> Trainer:
    """Returns a trainer with data, which trains `sizes.steps` steps after one that does not count.

    Args:
        model: to train.
        sizes: with vocabulary, sequence, and the batch and accumulation of a step.
        folder: for what it writes.
        helix: None for the stock Trainer.
        loss: as `compute_loss_func`.
        arguments: of `TrainingArguments`.
    """
    usual = {"optim": "adamw_torch_fused", "learning_rate": 1e-4, "save_strategy": "no", "logging_strategy": "no"}
    batch = {"per_device_train_batch_size": sizes.batch, "gradient_accumulation_steps": sizes.accumulation}
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(folder, max_steps=sizes.steps + 1, **usual, **batch, **quiet, **arguments)
    count = sizes.batch * sizes.accumulation * args.max_steps * getattr(sizes, "ep_size", 1)
    data = RandomTokens(count, sizes.sequence, sizes.vocabulary)
    given: dict[str, Any] = {"model": model, "args": args, "train_dataset": data, "compute_loss_func": loss}
    trainer = Trainer(**given) if helix is None else HelixTrainer(**given, helix_config=helix)
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_mixture(sizes: Any, coefficient: float) -> MixtralForCausalLM:
    """Returns a Mixtral of the sizes of `make_model`, with four experts and a loss of routers."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.sequence,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        pad_token_id=0,
    )
    return MixtralForCausalLM(config)


def make_sft(model: Any, sizes: Any, folder: str, helix: HelixConfig) -> Trainer:
    """Returns TRL's trainer under the mixin with the data of `make_trainer`."""
    import trl
    from datasets import Dataset

    kind = type("Made", (HelixTrainerMixin, trl.SFTTrainer), {})
    batch = {"per_device_train_batch_size": sizes.batch, "gradient_accumulation_steps": sizes.accumulation}
    usual = {"optim": "adamw_torch_fused", "learning_rate": 1e-4, "save_strategy": "no", "logging_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = trl.SFTConfig(folder, max_steps=sizes.steps + 1, max_length=None, **batch, **usual, **quiet)
    count = sizes.batch * sizes.accumulation * args.max_steps * getattr(sizes, "ep_size", 1)
    rows = RandomTokens(count, sizes.sequence, sizes.vocabulary).tokens
    data = Dataset.from_dict({"input_ids": rows.tolist()})
    trainer = kind(model=model, args=args, train_dataset=data, processing_class=few_words(), helix_config=helix)
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_dpo(sizes: Any, folder: str, helix: HelixConfig) -> Trainer:
    """Returns TRL's trainer of preferences under the mixin, with rows as many and as long as those of
    `make_trainer`."""
    import trl
    from datasets import Dataset

    kind = type("Made", (HelixTrainerMixin, trl.DPOTrainer), {})
    batch = {"per_device_train_batch_size": sizes.batch // 2, "gradient_accumulation_steps": sizes.accumulation}
    usual = {"optim": "adamw_torch_fused", "learning_rate": 1e-4, "save_strategy": "no", "logging_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = trl.DPOConfig(folder, max_steps=sizes.steps + 1, max_length=sizes.sequence, **batch, **usual, **quiet)
    count = sizes.batch * sizes.accumulation * args.max_steps * sizes.ep_size
    rows = RandomTokens(count, sizes.sequence, sizes.vocabulary).tokens
    half = sizes.sequence // 2
    texts = [" ".join(f"w{each}" for each in row) + " " for row in rows[:, :half].tolist()]
    names = "prompt", "chosen", "rejected"
    data = Dataset.from_list([dict(zip(names, (a, b, a), strict=True)) for a, b in itertools.pairwise(texts)][::2])
    model, tokenizer = made_of(sizes), few_words([f"w{number}" for number in range(2, sizes.vocabulary)])
    given: dict[str, Any] = {"model": model, "ref_model": copy.deepcopy(model), "processing_class": tokenizer}
    trainer = kind(args=args, train_dataset=data, helix_config=helix, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def made_of(sizes: Any) -> Any:
    """Returns a mixture for experts on ranks, otherwise a Llama."""
    return make_mixture(sizes, 0.02) if sizes.ep_size > 1 else make_model(sizes)


def few_words(more: Sequence[str] = ("a", "b", "c")) -> Any:
    """Returns a tokenizer of some words, and two for the padding and the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(("<pad>", "<eos>", *more))}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def compare_with_stock(options: argparse.Namespace) -> tuple[str, Any]:
    return compare(llamas({STOCK: (None, None), HELIX: (HelixConfig(tp_size=1), None)}, options), options)


def llamas(kinds: Mapping[str, tuple[HelixConfig | None, Any]], options: argparse.Namespace) -> dict[str, Maker]:
    """Returns what makes trainers of copies of one Llama, from the options and the loss of each."""
    model = make_model(options)

    def maker(helix: HelixConfig | None, loss: Any) -> Maker:
        return lambda folder: make_trainer(copy.deepcopy(model), options, folder, helix, loss, use_cpu=True)

    return {name: maker(helix, loss) for name, (helix, loss) in kinds.items()}


def layout_of(options: argparse.Namespace) -> HelixConfig:
    """Returns the layout; with `--plan auto` plans are measured in the first step, which does not count."""
    sizes = {name: getattr(options, name) for name in ("tp_size", "ep_size", "pp_size")}
    return HelixConfig(**sizes, plan=options.plan, tuning_share=1.0, cache=False)


def compare_sft(options: argparse.Namespace) -> tuple[str, Any]:
    helix = layout_of(options)
    alike = make_mixture(options, 0.02 / options.accumulation / options.ep_size)  # the Trainer adds these up
    makers: dict[str, Maker] = {
        "built-in loss": lambda folder: make_trainer(alike, options, folder, helix, use_cpu=True),
        "SFTTrainer with the mixin": lambda folder: make_sft(make_mixture(options, 0.02), options, folder, helix),
    }
    return compare(makers, options)


def compare_dpo(options: argparse.Namespace) -> tuple[str, Any]:
    helix = layout_of(options)
    makers: dict[str, Maker] = {
        "built-in loss": lambda folder: make_trainer(made_of(options), options, folder, helix, use_cpu=True),
        "DPOTrainer with the mixin": lambda folder: make_dpo(options, folder, helix),
    }
    return compare(makers, options)


def compare_losses(options: argparse.Namespace) -> tuple[str, Any]:
    def next_token(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return ForCausalLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch)

    helix = HelixConfig(tp_size=options.tp_size, plan="greedy")
    kinds = {"built-in loss": (helix, None), "loss of one's own": (helix, next_token)}
    return compare(llamas(kinds, options), options)


def compare(kinds: Mapping[str, Maker], options: argparse.Namespace) -> tuple[str, Any]:
    """Trains two kinds of trainers in turn.

    Args:
        kinds: what makes them, by name; ratios are over the first.
        options: of the command.
    """
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: make(folder) for name, make in kinds.items()}
        timers = {name: StepTimer() for name in kinds}
        for name, timer in timers.items():
            trainers[name].add_callback(timer)
            if getattr(trainers[name], "ref_model", None) is not None:
                trainers[name].ref_model.forward = timer.leave_out(trainers[name].ref_model.forward)
        for number in range(options.warmup_rounds + options.rounds):
            order = list(kinds) if number % 2 == 0 else list(reversed(kinds))
            losses = {name: trainers[name].train().training_loss for name in order}
            rounds.append({name: (timers[name].seconds, losses[name], timers[name].cpu_seconds) for name in kinds})
    first, second = kinds
    counted = rounds[options.warmup_rounds :]
    seconds = {name: statistics.median(each[name][0] for each in counted) for name in kinds}
    ratios = [each[second][0] / each[first][0] for each in counted]
    low, middle, high = statistics.quantiles(ratios, n=4)
    used = statistics.median(each[second][2] / each[first][2] for each in counted)
    apart = max(abs(each[first][1] - each[second][1]) for each in rounds)
    lines = [
        f"{type(trainers[first].model).__name__}: hidden {options.hidden}, {options.layers} layers, vocabulary "
        f"{options.vocabulary}, sequence {options.sequence}; tp_size {options.tp_size}, ep_size {options.ep_size}, "
        f"plan {options.plan}, {options.accumulation} micro-batches of {options.batch}; {options.rounds} rounds of "
        f"{options.steps} steps each, in turn",
        columns(("trainer", "median step ms"), [(name, f"{1e3 * each:.1f}") for name, each in seconds.items()]),
        f"ratio over rounds: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}, from {min(ratios):.3f} to "
        f"{max(ratios):.3f}; target: at most {TARGETS[options.study]:.2f}",
        f"ratio of the CPU seconds of rank 0, median: {used:.3f}",
        f"largest difference between the mean losses of a round: {apart:.1e}",
    ]
    return "\n".join(lines), {
        "seconds": seconds,
        "ratios": ratios,
        "cpu_ratio": used,
        "largest_loss_difference": apart,
        "rounds": rounds,
    }


# -- generation ----------------------------------------------------------------------------------------------------


def compare_generation(options: argparse.Namespace) -> tuple[str, Any]:
    """Generates greedily, with a cache, in turn; the stock model on rank 0 while the others wait."""
    stock = make_model(options)
    helix = HelixConfig(tp_size=options.tp_size, pp_size=options.pp_size, plan="greedy")
    with tempfile.TemporaryDirectory() as folder:
        cut = make_trainer(copy.deepcopy(stock), options, folder, helix, use_cpu=True).model
    prompts = RandomTokens(options.batch, options.sequence, options.vocabulary).tokens
    count = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens, "do_sample": False}

    def seconds(model: Any, runs: bool) -> tuple[float, float, Any]:
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        found = model.generate(prompts, **count) if runs else None
        used = time.process_time() - used
        dist.barrier()
        return time.perf_counter() - start, used, found

    rounds = []
    for number in range(options.warmup_rounds + options.rounds):
        kinds = [(stock, options.rank == 0), (cut, True)]
        times = [seconds(*each) for each in (kinds if number % 2 == 0 else kinds[::-1])]
        rounds.append(times if number % 2 == 0 else times[::-1])
    (*_, wanted), (*_, found) = rounds[-1]
    assert wanted is None or torch.equal(wanted, found)
    counted = [(one, two) for (one, *_), (two, *_) in rounds[options.warmup_rounds :]]
    used = statistics.median(two / one for (_, one, _), (_, two, _) in rounds[options.warmup_rounds :])
    low, middle, high = statistics.quantiles([two / one for one, two in counted], n=4)
    medians = [statistics.median(column) for column in zip(*counted, strict=True)]
    lines = [
        f"Llama: hidden {options.hidden}, {options.layers} layers, vocabulary {options.vocabulary}; "
        f"{options.new_tokens} tokens after {options.batch} prompts of {options.sequence}; tp_size {options.tp_size}, "
        f"pp_size {options.pp_size}; {options.rounds} rounds, in turn; the same tokens",
        columns(
            ("model", "median ms"), [(n, f"{1e3 * m:.1f}") for n, m in zip(("stock", "cut"), medians, strict=True)]
        ),
        f"ratio over rounds: median {middle:.2f}, quartiles {low:.2f} to {high:.2f}",
        f"ratio of the CPU seconds of rank 0, median: {used:.2f}",
    ]
    return "\n".join(lines), {"rounds": counted, "cpu_ratio": used}


# -- memory of DPO -------------------------------------------------------------------------------------------------


def stock_dpo() -> Any:
    import trl

    return trl.DPOTrainer


def compare_memory(options: argparse.Namespace) -> tuple[str, Any]:
    kind = type("Made", (HelixTrainerMixin, stock_dpo()), {})
    stock, mine = int(os.environ[STOCK_PEAK]), peak_of_step(kind, options)
    peaks = {"trl.DPOTrainer": stock, "with hf_helix": mine}
    lines = [
        f"DPO, vocabulary {options.vocabulary}, hidden {options.hidden}, {options.layers} layers, "
        f"{options.batch} pairs of {options.sequence} tokens, tp_size {options.tp_size}",
        columns(("trainer", "peak MB on rank 0"), [(name, f"{peak / 1e6:.1f}") for name, peak in peaks.items()]),
        f"ratio: {mine / stock:.3f}; target: at most {TARGETS['memory']:.2f}",
    ]
    return "\n".join(lines), peaks


def peak_of_step(kind: Any, options: argparse.Namespace) -> int:
    """Returns the peak of the second step; the first makes the gradients."""
    import trl
    from datasets import Dataset

    from hf_helix.measure.memory import LiveBytes
    from hf_helix.runtime.divided import plain_parameters

    config = llama(options.hidden, options.layers, options.vocabulary, options.heads, pad_token_id=0)
    half = options.sequence // 2
    texts = [{"prompt": "a " * half, "chosen": "b " * half, "rejected": "c " * half}] * 2 * options.batch
    usual = {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    batch = {"per_device_train_batch_size": options.batch, "max_length": options.sequence}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "model": LlamaForCausalLM(config),
            "ref_model": LlamaForCausalLM(config),
            "args": trl.DPOConfig(folder, max_steps=1, save_strategy="no", **batch, **usual),
            "train_dataset": Dataset.from_list(texts),
            "processing_class": few_words(),
        }
        if issubclass(kind, HelixTrainerMixin):
            given["helix_config"] = HelixConfig(tp_size=options.tp_size, plan="greedy")
        trainer = kind(**given)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        rows = next(iter(trainer.get_train_dataloader()))
        trainer.model.zero_grad(set_to_none=False)
        with plain_parameters():
            tally = LiveBytes([each.data for each in trainer.model.parameters()])
        with tally:
            trainer.training_step(trainer.model, rows)
    return tally.peak


STUDIES: Mapping[str, Callable[[argparse.Namespace], tuple[str, Any]]] = {
    "stock": compare_with_stock,
    "loss": compare_losses,
    "sft": compare_sft,
    "dpo": compare_dpo,
    "generate": compare_generation,
    "memory": compare_memory,
}

if __name__ == "__main__":
    main()
