"""A loss of the user's own beside the built-in one, and the memory of DPO with a large vocabulary.

Measured: the step time of HelixTrainer with `compute_loss_func`, the next-token loss of Transformers, over that
of HelixTrainer with the built-in loss; in turn, on copies of one Llama with the same data, in fp32 on the CPU. The
allocator keeps freed memory, as that of a GPU does: otherwise the kernel maps the logits anew in every micro-batch.
With `--memory`: the live bytes at the peak of a training step of TRL's DPOTrainer with its chunked head, stock on one
process and under the mixin on every rank, counted storage by storage; parameters and gradients do not count.

    python -m benchmarks.own_loss --tp_size 1
    python -m benchmarks.own_loss --tp_size 2
    python -m benchmarks.own_loss --memory 1 --tp_size 2
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import PrinterCallback

from benchmarks.common import add_outputs, columns, llama, options_of, save
from benchmarks.one_process import RandomTokens, StepTimer, make_model, make_training_arguments, run_steps
from benchmarks.ranks import Ranks
from hf_helix import HelixConfig, HelixTrainer, HelixTrainerMixin
from hf_helix.measure.memory import LiveBytes
from hf_helix.runtime.divided import plain_parameters

TARGET = 1.03
"""A loss of one's own may take this many times the step time of the built-in loss."""

STOCK_PEAK = "STOCK_PEAK"
"""The variable with the peak of the stock trainer, which is measured on one process before the ranks start."""

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": 2**30, "MALLOC_TRIM_THRESHOLD_": 2**32, "MALLOC_TOP_PAD_": 2**28}
"""Variables of glibc, in bytes, that a process reads at its start."""

BUILT_IN, OWN = "built-in loss", "loss of one's own"


def next_token(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return ForCausalLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch)


def measure_time(options: argparse.Namespace, folder: str) -> tuple[str, dict[str, Any]]:
    trainers = {}
    for name in (BUILT_IN, OWN):
        trainers[name] = HelixTrainer(
            model=make_model(options),
            args=make_training_arguments(options, folder, use_cpu=True),
            train_dataset=RandomTokens(
                options.micro_batch * options.accumulation * (options.steps + 1),
                options.sequence_length,
                options.vocab_size,
            ),
            compute_loss_func=next_token if name == OWN else None,
            helix_config=HelixConfig(tp_size=options.tp_size, plan="greedy"),
        )
        trainers[name].remove_callback(PrinterCallback)
        trainers[name].add_callback(StepTimer())
    rounds = []
    for number in range(options.warmup_rounds + options.rounds):
        order = list(trainers) if number % 2 else list(reversed(trainers))
        rounds.append({name: run_steps(trainers[name]) for name in order})
    counted = rounds[options.warmup_rounds :]
    ratios = [each[OWN]["seconds"] / each[BUILT_IN]["seconds"] for each in counted]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {name: statistics.median(each[name]["seconds"] for each in counted) for name in trainers}
    difference = max(abs(each[OWN]["loss"] - each[BUILT_IN]["loss"]) for each in rounds)
    lines = [
        f"tp_size {options.tp_size}, {options.accumulation} micro-batches, {options.rounds} rounds in turn",
        columns(("loss", "median step ms"), [(name, f"{1e3 * seconds:.1f}") for name, seconds in medians.items()]),
        f"ratio: median {middle:.3f} (quartiles {low:.3f} to {high:.3f}); target: at most {TARGET:.2f}",
        f"largest difference between the mean losses of a round: {difference:.1e}",
    ]
    return "\n".join(lines), {"seconds": medians, "ratios": ratios, "loss_difference": difference}


# -- memory of DPO -------------------------------------------------------------------------------------------------


def measure_memory(options: argparse.Namespace, folder: str) -> tuple[str, dict[str, Any]]:
    import trl

    kind = type("Made", (HelixTrainerMixin, trl.DPOTrainer), {})
    stock, mine = int(os.environ[STOCK_PEAK]), peak_of_step(kind, options, folder)
    peaks = {"trl.DPOTrainer": stock, "with hf_helix": mine}
    lines = [
        f"DPO, vocabulary {options.vocab_size}, hidden {options.hidden_size}, {options.layers} layers, "
        f"{options.micro_batch} pairs of {options.sequence_length} tokens, tp_size {options.tp_size}",
        columns(("trainer", "peak MB on rank 0"), [(name, f"{peak / 1e6:.1f}") for name, peak in peaks.items()]),
        f"ratio: {mine / stock:.3f}; target: at most 1",
    ]
    return "\n".join(lines), peaks


def peak_of_step(kind: Any, options: argparse.Namespace, folder: str) -> int:
    """The peak of the second step; the first makes the gradients."""
    import trl
    from datasets import Dataset

    torch.manual_seed(0)
    config = llama(options.hidden_size, options.layers, options.vocab_size, options.heads, pad_token_id=0)
    arguments = trl.DPOConfig(
        folder,
        per_device_train_batch_size=options.micro_batch,
        max_steps=1,
        max_length=options.sequence_length,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    half = options.sequence_length // 2
    texts = [{"prompt": "a " * half, "chosen": "b " * half, "rejected": "c " * half}] * 2 * options.micro_batch
    given: dict[str, Any] = {
        "model": LlamaForCausalLM(config),
        "ref_model": LlamaForCausalLM(config),
        "args": arguments,
        "train_dataset": Dataset.from_list(texts),
        "processing_class": make_tokenizer(),
    }
    if issubclass(kind, HelixTrainerMixin):
        given["helix_config"] = HelixConfig(tp_size=options.tp_size, plan="greedy")
    trainer = kind(**given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.zero_grad(set_to_none=False)
    with plain_parameters():
        tally = LiveBytes([each.data for each in trainer.model.parameters()])
    with tally:
        trainer.training_step(trainer.model, batch)
    return tally.peak


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


# -- the command ---------------------------------------------------------------------------------------------------


def main() -> None:
    model = {"hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocab_size": 4096, "sequence_length": 256}
    batch = {"micro_batch": 2, "accumulation": 4, "optimizer": "adamw_torch_fused"}
    parser = options_of(__doc__, **model, **batch, tp_size=1, rounds=12, warmup_rounds=2, steps=4, memory=0)
    add_outputs(parser)
    options = parser.parse_args()
    options.intermediate_size = options.hidden_size * 11 // 4
    if options.memory and "RANK" not in os.environ:
        import trl

        with tempfile.TemporaryDirectory() as folder:
            os.environ[STOCK_PEAK] = str(peak_of_step(trl.DPOTrainer, options, folder))
    for name, size in KEEPS_MEMORY.items():
        os.environ.setdefault(name, str(size))
    Ranks(options.tp_size).run(run, options)


def run(options: argparse.Namespace) -> None:
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        text, result = (measure_memory if options.memory else measure_time)(options, str(Path(folder, "run")))
    if options.rank == 0:
        print(text)
        save(options, "A loss of one's own", __doc__, text, result)


if __name__ == "__main__":
    main()
