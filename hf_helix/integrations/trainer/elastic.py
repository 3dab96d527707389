"""Runs whose number of ranks changes between starts: the training arguments on a layout of `HelixConfig(layouts=...)`.

In:   training arguments that hold for the most ranks, and the options with `layouts`.
Out:  arguments for the present number of ranks, whose steps take the same samples; the samples of a group by length.
Must hold: steps, epochs and the order of the data are the same on every number of ranks; a combination that cannot keep
them is an error at the first start. The user's arguments stay as they are.
"""

import copy
import math
from typing import Any

from hf_helix.config import HelixConfig
from hf_helix.integrations.accelerate.layouts import replicas_of, steps_of

_OF_GENERATION = ("steps_per_generation", "generation_batch_size")
"""Arguments of TRL's online classes, which follow from `gradient_accumulation_steps` unless given."""


def following(args: Any, given: HelixConfig) -> Any:
    """Returns the training arguments of this run's ranks; the same object if nothing changes.

    Raises:
        ValueError: on some number of ranks, a step would have other samples.
    """
    if given.layouts is None or args.accelerator_config.split_batches:  # then processes share one batch
        return args
    if (args.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps", 1) > 1:
        raise ValueError(
            "layouts with accelerator_config={'gradient_accumulation_kwargs': {'num_steps': ...}}: the number follows "
            "the ranks; use gradient_accumulation_steps"
        )
    before = args.gradient_accumulation_steps
    steps, generates = steps_of(given, before), hasattr(args, _OF_GENERATION[0])
    if generates and args.steps_per_generation != before:
        raise ValueError(
            f"layouts with steps_per_generation={args.steps_per_generation} and gradient_accumulation_steps={before}: "
            "a generation is of one step; leave out steps_per_generation and generation_batch_size"
        )
    if steps == before:
        return args
    args = copy.copy(args)
    for name in ("gradient_accumulation_steps", *_OF_GENERATION * generates):
        setattr(args, name, getattr(args, name) * steps // before)
    return args


def check_epochs(trainer: Any, given: HelixConfig, steps: int) -> None:
    """Refuses data whose epochs would have more steps on some ranks than on others.

    Args:
        trainer: a complete trainer.
        given: the options, with `layouts` or without.
        steps: the micro-batches of a step on the most ranks.

    Raises:
        ValueError: names the steps, and a way out.
    """
    args, data = trainer.args, trainer.train_dataset
    is_shared = args.accelerator_config.split_batches
    if given.layouts is None or is_shared or not args.dataloader_drop_last or not hasattr(data, "__len__"):
        return
    replicas = replicas_of(given)
    taken, rows = steps * replicas[max(replicas)], args.train_batch_size
    found = {world: math.ceil(len(data) // (rows * count) / (taken // count)) for world, count in replicas.items()}
    if len(set(found.values())) > 1:
        several = ", ".join(f"{count} on {world} ranks" for world, count in found.items())
        raise ValueError(
            f"dataloader_drop_last=True with layouts: an epoch of {len(data)} samples has another number of steps on "
            f"other ranks ({several}); use dataloader_drop_last=False, or a multiple of {rows * taken} samples"
        )
