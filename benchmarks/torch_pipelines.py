"""torch's own pipelining beside the unsplit model: gradients of models that are frozen in part, tied, or not zeroed.

Two ranks run a Llama of four layers under a schedule of `torch.distributed.pipelining`, in fp32, with four
micro-batches; every gradient that the unsplit model has is compared. A cell is `right`, the number of gradients that
are None, or the largest relative difference and how many gradients differ.

    python -m benchmarks.torch_pipelines
"""

import argparse
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import add_outputs, columns, facts, llama, options_of, save
from benchmarks.ranks import Ranks
from benchmarks.rivals import Stage

LAYERS, MICROBATCHES, TOKENS = 4, 4, 16
LIMIT = 1e-4  # of a gradient's relative difference
SCHEDULES = {"1F1B": (1, False), "Interleaved1F1B": (2, False), "ZBVZeroBubble": (2, True), "DualPipeV": (2, True)}
CASES: Mapping[str, dict[str, Any]] = {
    "all trained": {},
    **{f"{count} of {LAYERS} layers frozen": {"frozen": count} for count in (1, 2, 3)},
    "tied embedding": {"tied": True},
    "a second step, gradients kept": {"steps": 2},
}


def main() -> None:
    parser = options_of(__doc__)
    add_outputs(parser)
    Ranks(2).run(work, parser.parse_args())


def work(options: argparse.Namespace) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    rows = []
    for case, how in CASES.items():
        cells = [_cell(schedule, options.rank, **how) for schedule in SCHEDULES]
        rows.append((case, *cells))
    if options.rank == 0:
        text = columns(("case", *SCHEDULES), rows)
        print("\n".join([text, *(f"{name}: {value}" for name, value in facts().items())]))
        save(options, "torch's pipelining", __doc__, text, rows)


def _cell(schedule: str, rank: int, frozen: int = 0, tied: bool = False, steps: int = 1) -> str:
    """Returns what a schedule makes of the gradients of a case. Collective."""
    count, is_folded = SCHEDULES[schedule]
    if tied and not is_folded:
        return "two copies"  # the embedding and the head are on different ranks
    model, wanted = _model(frozen, tied), _model(frozen, tied)
    ids = torch.randint(3, 96, (MICROBATCHES, TOKENS), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        for row in ids.split(1):
            (wanted(input_ids=row, labels=row, use_cache=False).loss / MICROBATCHES).backward()
    try:
        found = _pipelined(model, schedule, count, is_folded, rank, ids, steps)
    except Exception as error:
        found = {"": f"{type(error).__name__}: {error}"}
    expected = {name: each.grad for name, each in wanted.named_parameters() if each.grad is not None}
    mine = _compared(found, expected)
    of_ranks: list[Any] = [None] * 2
    dist.all_gather_object(of_ranks, mine)
    missing = sum(each[0] for each in of_ranks)
    others = [value for each in of_ranks for value in each[1] if value > LIMIT]
    errors = [each[2] for each in of_ranks if each[2]]
    if errors:
        return f"raises: {errors[0][:60]}"
    words = [f"{missing} None"] if missing else []
    words += [f"{len(others)} off, up to {max(others):.0e}"] if others else []
    return "; ".join(words) or "right"


def _model(frozen: int, tied: bool) -> Any:
    torch.manual_seed(0)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama(32, LAYERS, 96, heads=4, tie_word_embeddings=tied))
    for part in (*([model.model.embed_tokens] if frozen else []), *model.model.layers[:frozen]):
        part.requires_grad_(False)
    return model


def _pipelined(
    model: Any, schedule: str, count: int, is_folded: bool, rank: int, ids: Tensor, steps: int
) -> dict[str, Any]:
    """Returns the gradients of this rank's parameters by their names in the model."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    stages = 2 * count
    own = [rank, stages - 1 - rank] if is_folded else list(range(rank, stages, 2))
    bounds = [LAYERS * place // stages for place in range(stages + 1)]
    parts = [Stage(model, range(bounds[n], bounds[n + 1]), n == 0, n == stages - 1) for n in own]
    held = [
        pipelining.PipelineStage(part, number, stages, torch.device("cpu"))
        for part, number in zip(parts, own, strict=True)
    ]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())

    made = getattr(schedules, f"Schedule{schedule}")(held if count > 1 else held[0], MICROBATCHES, loss_fn=loss_of)
    for _ in range(steps):
        given = (ids,) if 0 in own else ()
        made.step(*given, **({"target": ids, "losses": []} if stages - 1 in own else {}))
    mine = {id(parameter) for part in parts for parameter in part.parameters()}
    return {name: each.grad for name, each in model.named_parameters() if id(each) in mine}


def _compared(found: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> tuple[int, list[float], str]:
    """Returns the number of gradients that are missing, the relative differences of the others, and an error."""
    if "" in found:
        return 0, [], found[""]
    own = {name: value for name, value in found.items() if name in wanted}
    missing = sum(value is None for value in own.values())
    others = [
        float((value - wanted[name]).norm() / wanted[name].norm()) for name, value in own.items() if value is not None
    ]
    return missing, others, ""


if __name__ == "__main__":
    sys.exit(main())
