"""Refuses options of Accelerate that cannot be honoured, by name and before any training.

In:   an `Accelerator`, a data loader, or the launch mode of CUDA kernels.
Out:  nothing, or an error with every refused option and a working value.
Must hold: an error comes before any change and any communication.

Refusals here concern options of Accelerate. The other places: `hf_helix.config` for options of `HelixConfig`,
`hf_helix.engine.cut.checks` for models and batches, `trainer/checks.py` for arguments and methods of a Trainer,
`optimizers.py` for optimizers.
"""

import os
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager


def check_accelerator(accelerator: Any, plugin: ParallelismConfig, pp_size: int) -> None:
    """Refuses an `Accelerator` whose options cannot be honoured.

    Raises:
        ValueError: names every such option and a working value.
    """
    if accelerator.parallelism_config is not plugin:
        raise ValueError(
            f"the Accelerator was made with parallelism_config={accelerator.parallelism_config!r}, and not with this "
            "plugin; use Accelerator(parallelism_config=plugin, ...), as the first of the process"
        )
    problems, kind = [], getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    problems += launch_problems(pp_size, accelerator.device)
    if accelerator.mixed_precision not in ("no", "bf16"):
        problems.append(f"mixed_precision={accelerator.mixed_precision!r}: use mixed_precision='bf16', or 'no'")
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        problems.append(f"distributed_type={kind}: use MULTI_GPU: hf_helix cuts the model itself")
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        problems.append(
            "dynamo_backend: use dynamo_backend='no': operators are issued one by one; HelixConfig(compile=True) "
            "compiles them"
        )
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        problems.append(
            "sync_each_batch=True: use sync_each_batch=False: gradients are summed over the ranks once for a window"
        )
    if problems:
        raise ValueError("HelixPlugin.prepare cannot honour " + "\n  ".join(problems))


def check_loader(loader: Any, accelerator: Any, dp_size: int) -> None:
    """Refuses a data loader without an equal number of distinct batches for every data-parallel rank.

    Args:
        loader: a data loader that is not prepared yet.
        accelerator: will prepare the data loader.
        dp_size: the number of data-parallel ranks.

    Raises:
        ValueError: names the option and a working value.
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


def launch_problems(pp_size: int, device: torch.device, full_determinism: bool = False) -> list[str]:
    """Returns problems with blocking kernel launches: a receive ends after the send of another rank, and the other rank
    may first need this rank's next launch.
    """
    if pp_size == 1 or device.type != "cuda":
        return []
    why = f"with pp_size={pp_size} ranks would wait for each other for ever, since every launch would wait for its end"
    if full_determinism:
        return [f"full_determinism=True: use full_determinism=False: it sets CUDA_LAUNCH_BLOCKING=1; {why}"]
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return [f"CUDA_LAUNCH_BLOCKING=1 in the environment: unset it, or use pp_size=1: {why}"]
    return []


def run_in_mixed_precision(model: Any, accelerator: Any) -> None:
    """Makes calls of a model run under the autocast of an `Accelerator`, if any, and return fp32."""
    if accelerator.native_amp:
        under_autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        model.forward = convert_outputs_to_fp32(under_autocast(model.forward))
