"""Transformers' own tensor parallelism beside ours, class by class: `python -m benchmarks.native_census`.

In:   names of causal-LM classes with a plan for tensor parallelism; without any, all of them. `--autotp` runs
      DeepSpeed's AutoTP, if it is installed, in place of the plan of Transformers.
Out:  a file of findings (`benchmarks/results/native-census.json`): for each class the relative differences of the loss,
      of the worst gradient, of the worst gradient after two micro-batches, and of the loaded weights, from the unsplit
      model; or the error. Of AutoTP, which keeps gradients in slices of its own, of the loss, and of the loss after an
      optimizer step. A line for each class while it runs.
Must hold: the two ranks of a class are processes of their own, ended after `--timeout` seconds; one that fails or hangs
does not end the census. Nothing of hf_helix computes a value: it only makes the small model and its weights.

Weights are random, in fp32, and large enough for caps, norms and windows to matter, as in the proof; 2 rows of 16
tokens a micro-batch; training mode, no dropout. Right is a loss within 1e-5 and every gradient within 1e-4 of its norm,
as in the proof of hf_helix.
Then `make docs` writes the table of docs/models.md.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from hf_helix.engine.proof.prove import Subject
from hf_helix.engine.proof.reference import scale_weights
from hf_helix.models.stock.causal_lm import causal_lm_classes

FILE = Path(__file__).parent / "results" / "native-census.json"
NATIVE, AUTOTP = "native", "autotp"
NOT_RUN = "not run, since the unsplit small model fails"
RANKS, ROWS, TOKENS = 2, 2, 16
RATE = 0.01  # of SGD


@dataclass(frozen=True)
class Found:
    """The relative differences of a class from its unsplit model; NaN of a value that is not a number.

    Attributes:
        loss: of a micro-batch.
        gradients: the worst of a micro-batch.
        accumulated: the worst after two micro-batches.
        weights: the worst of the loaded weights.
        stepped: of the loss after an optimizer step of two micro-batches, of AutoTP.
        error: the error, in one line; empty without one.
    """

    loss: float = 0.0
    gradients: float = 0.0
    accumulated: float = 0.0
    weights: float = 0.0
    stepped: float = 0.0
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CLASS", choices=causal_lm_classes(), help="these classes")
    parser.add_argument("--autotp", action="store_true", help="run DeepSpeed's AutoTP instead")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that a class may take")
    parser.add_argument("--out", type=Path, default=FILE, help="the file that is read and written")
    options = parser.parse_args()
    kind = AUTOTP if options.autotp else NATIVE
    about = versions(kind)
    census = json.loads(options.out.read_text()) if options.out.exists() else {}
    if census.get(kind, {}).get("versions") != about:
        census[kind] = {"versions": about, "classes": {}}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.native_census"])
    names = options.only or causal_lm_classes()
    for place, name in enumerate(names, 1):
        begin = time.monotonic()
        found = take(context, kind, name, options.timeout)
        if found is not None:
            census[kind]["date"] = datetime.date.today().isoformat()
            census[kind]["classes"][name] = asdict(found)
            options.out.write_text(json.dumps(census, indent=1, sort_keys=True) + "\n")
        print(f"{place}/{len(names)} {name}: {found or 'no plan'} ({time.monotonic() - begin:.0f} s)", flush=True)


def versions(kind: str) -> dict[str, str]:
    """Returns the versions of the packages that a census runs. Exits without DeepSpeed if it needs it."""
    names = ["torch", "transformers", *(["deepspeed"] if kind == AUTOTP else [])]
    try:
        return {name: version(name) for name in names}
    except PackageNotFoundError as error:
        sys.exit(f"--autotp needs DeepSpeed, which is not installed ({error}); pip install deepspeed")


def take(context: Any, kind: str, name: str, timeout: float) -> Found | None:
    """Returns the differences of a class; None if it has no plan for tensor parallelism."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(kind, name, folder, rank), daemon=True) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + timeout
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
            time.sleep(0.1)
            if list(Path(folder).glob("error.*")):
                end = min(end, time.monotonic() + 5)  # the other rank may wait for ever
        for rank in ranks:
            rank.kill()
            rank.join()
        results = [Path(folder, f"found.{rank}") for rank in range(RANKS)]
        if all(path.exists() for path in results):
            found = json.loads(results[0].read_text())
            return None if found is None else Found(**found)
        errors = [path.read_text() for path in sorted(Path(folder).glob("error.*"))]
        return Found(error=next(iter(errors), f"silent for {timeout:.0f} s"))


# -- one rank --------------------------------------------------------------------------------------------------------


def run(kind: str, name: str, folder: str, rank: int) -> None:
    """One rank of a class: writes what it has found, or its error."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
        found = compare(kind, name, folder, rank)
        Path(folder, f"found.{rank}").write_text(json.dumps(None if found is None else asdict(found)))
        dist.barrier()
    except Exception as error:  # of the class, of any kind
        Path(folder, f"error.{rank}").write_text(one_line(error))


def compare(kind: str, name: str, folder: str, rank: int) -> Found | None:
    """Returns the differences of the cut model of a class; None without a plan. Collective."""
    try:
        model = Subject.of(name).build().train()
        scale_weights(model)
        batches = [batch_of(model, seed) for seed in range(2)]
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        losses, after = train(model, batches)
    except Exception as error:
        return Found(error=f"{NOT_RUN}: {one_line(error)}")
    if kind == NATIVE and not model._tp_plan:
        return None
    model.zero_grad(set_to_none=True)
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    if kind == AUTOTP:
        return compare_autotp(model, batches, folder)
    cut = native(type(model), folder).train()
    loaded = {name: full(weight) for name, weight in cut.named_parameters()}
    cut_losses, cut_after = train(cut, batches)
    return Found(
        loss=difference(cut_losses[0], losses[0]),
        gradients=worst(cut_after[0], after[0]),
        accumulated=worst(cut_after[1], after[1]),
        weights=worst(loaded, weights),
    )


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def native(kind: Any, folder: str) -> Any:
    """Returns a model that Transformers has cut by its plan."""
    from transformers.distributed import DistributedConfig

    return kind.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=RANKS), dtype=torch.float32)


def compare_autotp(model: Any, batches: Sequence[Tensor], folder: str) -> Found:
    """Returns the differences of the losses of a model that DeepSpeed cuts; it keeps gradients in slices of its own."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
    deepspeed.init_distributed("gloo")
    cut = type(model).from_pretrained(folder, dtype=torch.float32).train()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": 0.0,
        "tensor_parallel": {"autotp_size": RANKS},
        "zero_optimization": {"stage": 0},
    }
    optimizer = torch.optim.SGD(cut.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=cut, optimizer=optimizer, config=config)
    found = []
    for ids in [*batches, batches[0]]:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(full(loss))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, _ = train(model, batches)
    for weight in model.parameters():
        weight.grad = None if weight.grad is None else weight.grad / len(batches)
    optimizer.step()
    stepped, _ = train(model, batches[:1])
    return Found(loss=difference(found[0], losses[0]), stepped=difference(found[-1], stepped[0]))


def batch_of(model: Any, seed: int) -> Tensor:
    """Returns the rows of a micro-batch, the same on every rank."""
    length = min(100, model.config.get_text_config().vocab_size)
    return torch.randint(3, length, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


def train(model: Any, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Returns the loss of every micro-batch, and all gradients after each."""
    losses, after = [], []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(full(loss))
        after.append({name: full(each.grad) for name, each in model.named_parameters() if each.grad is not None})
    return losses, after


def full(value: Any) -> Tensor:
    """Returns a copy of a tensor, gathered if it is cut."""
    tensor: Tensor = value.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def worst(mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Returns the largest relative difference of tensors by name; infinity if one is missing or has another shape."""
    values = [
        difference(mine[name], value) if name in mine and mine[name].shape == value.shape else math.inf
        for name, value in wanted.items()
    ]
    return max(values, default=0.0, key=lambda value: math.inf if math.isnan(value) else value)


def difference(mine: Tensor, wanted: Tensor) -> float:
    """Returns the norm of a difference relative to what is wanted; the norm itself if that is nearly zero."""
    norm = float(torch.linalg.vector_norm(wanted))
    return float(torch.linalg.vector_norm(mine - wanted)) / (norm if norm > 1e-6 else 1.0)


if __name__ == "__main__":
    main()
