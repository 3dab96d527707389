"""What adapters add to a step of a small model that is cut over two ranks, on the CPU.

`experts` cuts a Mixtral twice over two data-parallel ranks that share its experts (`ep_size=2`): with LoRA adapters of
attention, and with adapters of attention, experts and routers. `dora` cuts a Llama twice (`tp_size=2`): with LoRA, and
with DoRA, on every linear. Windows of the two follow each other, and in reverse the next time, under `greedy`. Seconds
are those of the slower rank, and of both CPUs together, which other processes disturb less; ratios are medians of the
rounds' ratios. Operations are those of the matrix products that ran, as torch counts them.

    python -m benchmarks.adapters experts
    python -m benchmarks.adapters experts --hidden 512 --rank_of_adapters 32
    python -m benchmarks.adapters dora --lora_dropout 0.05
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import add_outputs, columns, facts, options_of, save
from benchmarks.ranks import Ranks

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "experts": {
        "attention": {"target_modules": ATTENTION},
        "attention, experts, routers": {"target_modules": "all-linear"},
    },
    "dora": {
        "LoRA": {"target_modules": "all-linear"},
        "DoRA": {"target_modules": "all-linear", "use_dora": True},
    },
}
"""What is compared: the fewer adapters, or the simpler ones, first."""


def main() -> None:
    sizes = {"hidden": 256, "layers": 4, "experts": 8, "microbatches": 4, "batch": 4, "sequence": 256}
    parser = options_of(__doc__, **sizes, rank_of_adapters=8, lora_dropout=0.0, repeats=9)
    parser.add_argument("what", choices=ADAPTERS, help="the adapters that are compared")
    add_outputs(parser)
    Ranks().run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank: windows of both models in turn."""
    from hf_helix.runtime.distributed.agreement import all_gather_object

    with tempfile.TemporaryDirectory() as folder:
        adapters = ADAPTERS[options.what]
        windows = {name: window_of(lora, folder, options) for name, lora in adapters.items()}
        operations = {name: operations_of(window) for name, window in windows.items()}
        rounds = []
        for number in range(options.repeats):
            order = list(adapters)[:: 1 if number % 2 else -1]
            rounds.append(all_gather_object({name: seconds_of(windows[name]) for name in order}))
    if options.rank == 0:
        report(operations, rounds, options)


def window_of(adapters: dict[str, Any], folder: str, options: argparse.Namespace) -> Callable[[], object]:
    """Returns a function that runs a window of a model with adapters, and drops its gradients."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from hf_helix import HelixConfig, HelixTrainer
    from hf_helix.engine.cut.microbatches import LossScale, WindowMaker

    transformers.logging.set_verbosity_error()
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": options.layers}
    sizes |= {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden, "vocab_size": 4096}
    torch.manual_seed(0)
    if options.what == "experts":
        config: Any = transformers.MixtralConfig(**sizes, num_local_experts=options.experts)
        helix = HelixConfig(ep_size=2, plan="greedy", cache=False)
    else:
        config, helix = transformers.LlamaConfig(**sizes), HelixConfig(tp_size=2, plan="greedy", cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=options.rank_of_adapters, lora_dropout=options.lora_dropout, task_type="CAUSAL_LM", **adapters)
    args = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    runner = HelixTrainer(model=get_peft_model(model, lora), args=args, helix_config=helix).helix.runner
    model.train()
    maker, window = WindowMaker(model, runner.mesh), []
    scale = LossScale(torch.tensor(1.0 / (options.microbatches * options.batch * options.sequence)))
    for place in range(options.microbatches):
        generator = torch.Generator().manual_seed(2 * place + (options.rank if options.what == "experts" else 0))
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
    simple, more = ADAPTERS[options.what]
    walls = {name: [max(rank[name][0] for rank in ranks) for ranks in rounds] for name in (simple, more)}
    cpus = {name: [sum(rank[name][1] for rank in ranks) for ranks in rounds] for name in (simple, more)}
    rows = []
    for name in (simple, more):
        seconds = (f"{statistics.median(each[name]):.3f}" for each in (walls, cpus))
        rows.append([name, *seconds, f"{operations[name] / 1e9:.2f}"])

    def ratios(seconds: dict[str, list[float]]) -> str:
        each = [slow / fast for slow, fast in zip(seconds[more], seconds[simple], strict=True)]
        return f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"

    rows.append(["ratio", ratios(walls), ratios(cpus), f"{operations[more] / operations[simple]:.3f}"])
    table = columns(["adapters", "step s", "CPU s", "10^9 operations"], rows)
    print("\n".join(f"{name}: {value}" for name, value in facts().items()))
    print(table)
    save(options, f"Adapters: {options.what}", __doc__, table, rows)


if __name__ == "__main__":
    main()
