"""Options of Accelerate that cannot be honoured, refused by name before any training.

In:   an `Accelerator`, or a data loader.
Out:  nothing, or an error that names every such option and a value that works.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_helix.integrations.accelerate.plugin import HelixPlugin
from hf_helix.integrations.trainer.checks import problems_of_launches

# -- a loop around Accelerate --------------------------------------------------------------------------------------


def check_accelerator(accelerator: Any, plugin: HelixPlugin) -> None:
    """Refuse an `Accelerator` whose options cannot be honoured.

    Raises:
        ValueError: names every such option and a value that works.
    """
    if accelerator.parallelism_config is not plugin:
        raise ValueError(
            f"the Accelerator was made with parallelism_config={accelerator.parallelism_config!r}, and not with this "
            "plugin; use Accelerator(parallelism_config=plugin, ...), as the first of the process"
        )
    problems, kind = [], getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    problems += problems_of_launches(plugin.config.pp_size, accelerator.device)
    if accelerator.mixed_precision not in ("no", "bf16"):
        problems.append(f"mixed_precision={accelerator.mixed_precision!r}: use mixed_precision='bf16', or 'no'")
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        problems.append(f"distributed_type={kind}: use MULTI_GPU: hf_helix cuts the model itself")
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        problems.append("dynamo_backend: use dynamo_backend='no': operators are issued one by one")
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        problems.append(
            "sync_each_batch=True: use sync_each_batch=False: gradients are summed over the ranks once for a window"
        )
    if problems:
        raise ValueError("HelixPlugin.prepare cannot honour this Accelerator:\n  " + "\n  ".join(problems))


def check_loader(loader: Any, accelerator: Any, dp_size: int) -> None:
    """Refuse data that would not reach every data-parallel rank as often, or the same way.

    Raises:
        ValueError: names the option and a value that works.
    """
    if dp_size == 1:
        return
    with_ranks = f"with {dp_size} data-parallel ranks: use DataLoaderConfiguration"
    if not accelerator.even_batches:
        raise ValueError(f"even_batches=False {with_ranks}(even_batches=True): ranks must run as many batches")
    is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if accelerator.dispatch_batches or (is_stream and accelerator.dispatch_batches is None):
        raise ValueError(
            f"{'an iterable dataset' if is_stream else 'dispatch_batches=True'} {with_ranks}(dispatch_batches=False): "
            "otherwise every rank would get the same batches"
        )
