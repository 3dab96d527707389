"""Mixed precision of a cut model that is called: what `Accelerator.prepare` does to a model that it wraps."""

from typing import Any

from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager


def run_in_mixed_precision(model: Any, accelerator: Any) -> None:
    """Makes calls of a model run under the autocast of an `Accelerator`, if any, and return fp32."""
    if accelerator.native_amp:
        under_autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        model.forward = convert_outputs_to_fp32(under_autocast(model.forward))
