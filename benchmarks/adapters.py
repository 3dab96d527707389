"""What LoRA adapters of experts and routers add to a step with adapters of attention, at `ep_size=2` on the CPU.

Cuts one small Mixtral twice over two data-parallel ranks that share its experts: with adapters of attention, and with
adapters of attention, experts and routers. Windows of the two follow each other, and in reverse the next time, under
`greedy`. Seconds are those of the slower rank, and of both CPUs together, which other processes disturb less; ratios
are medians of the rounds' ratios. Operations are those of the matrix products that ran, as torch counts them.

    python -m benchmarks.adapters
    python -m benchmarks.adapters --hidden 512 --rank_of_adapters 32
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import add_outputs, columns, facts, options_of, save
from benchmarks.ranks import Ranks

ATTENTION, ALL = "attention", "attention, experts, routers"
TARGETS: dict[str, Any] = {ATTENTION: ["q_proj", "k_proj", "v_proj", "o_proj"], ALL: "all-linear"}


def main() -> None:
    sizes = {"hidden": 256, "layers": 4, "experts": 8, "microbatches": 4, "batch": 4, "sequence": 256}
    parser = options_of(__doc__, **sizes, rank_of_adapters=8, repeats=9)
    add_outputs(parser)
    Ranks().run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank: windows of both models in turn."""
    from hf_helix.runtime.distributed.agreement import all_gather_object

    with tempfile.TemporaryDirectory() as folder:
        windows = {name: window_of(name, folder, options) for name in TARGETS}
        operations = {name: operations_of(window) for name, window in windows.items()}
        rounds = []
        for number in range(options.repeats):
            order = list(TARGETS)[:: 1 if number % 2 else -1]
            rounds.append(all_gather_object({name: seconds_of(windows[name]) for name in order}))
    if options.rank == 0:
        report(operations, rounds, options)


def window_of(name: str, folder: str, options: argparse.Namespace) -> Callable[[], object]:
    """Returns a function that runs a window of a model with adapters, and drops its gradients."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from hf_helix import HelixConfig, HelixTrainer
    from hf_helix.engine.cut.microbatches import LossScale, WindowMaker

    transformers.logging.set_verbosity_error()
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": options.experts}
    sizes |= {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden, "vocab_size": 4096}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_hidden_layers=options.layers))
    lora = LoraConfig(r=options.rank_of_adapters, target_modules=TARGETS[name], task_type="CAUSAL_LM")
    args = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    helix = HelixConfig(ep_size=2, plan="greedy", cache=False)
    runner = HelixTrainer(model=get_peft_model(model, lora), args=args, helix_config=helix).helix.runner
    model.train()
    maker, window = WindowMaker(model, runner.mesh), []
    scale = LossScale(torch.tensor(1.0 / (options.microbatches * options.batch * options.sequence)))
    for place in range(options.microbatches):
        generator = torch.Generator().manual_seed(2 * place + options.rank)
        ids = torch.randint(0, 4096, (options.batch, options.sequence), generator=generator)
        window.append(maker.microbatch({"input_ids": ids, "labels": ids}, scale, (0, place)))

    def run() -> None:
        runner.train_window(window)
        for parameter in runner.rank_units.own_rows:
            parameter.grad = None

    run()
    return run


def operations_of(window: Callable[[], object]) -> int:
    """Returns the operations of a window's matrix products on all ranks."""
    from torch.utils.flop_counter import FlopCounterMode

    from hf_helix.runtime.distributed.agreement import all_gather_object

    with FlopCounterMode(display=False) as counter:
        window()
    return sum(all_gather_object(counter.get_total_flops()))


def seconds_of(window: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of a window, and of this rank's CPU."""
    start, start_of_cpu = time.perf_counter(), time.process_time()
    window()
    return time.perf_counter() - start, time.process_time() - start_of_cpu


def report(operations: dict[str, int], rounds: list[list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Prints and saves the table."""
    walls = {name: [max(rank[name][0] for rank in ranks) for ranks in rounds] for name in TARGETS}
    cpus = {name: [sum(rank[name][1] for rank in ranks) for ranks in rounds] for name in TARGETS}
    rows = []
    for name in TARGETS:
        seconds = (f"{statistics.median(each[name]):.3f}" for each in (walls, cpus))
        rows.append([name, *seconds, f"{operations[name] / 1e9:.2f}"])

    def ratios(seconds: dict[str, list[float]]) -> str:
        each = [more / less for more, less in zip(seconds[ALL], seconds[ATTENTION], strict=True)]
        return f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"

    rows.append(["ratio", ratios(walls), ratios(cpus), f"{operations[ALL] / operations[ATTENTION]:.3f}"])
    table = columns(["adapters of", "step s", "CPU s", "10^9 operations"], rows)
    print("\n".join(f"{name}: {value}" for name, value in facts().items()))
    print(table)
    save(options, "Adapters of experts", __doc__, table, rows)


if __name__ == "__main__":
    main()
