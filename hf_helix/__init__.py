"""hf_helix: communication-hiding training for Hugging Face models.

Top-level names are loaded on first use, so that `import hf_helix` is quick and planning runs without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_helix.runtime.distributed.environment import set_connections
from hf_helix.version import __version__

_HOMES = {
    "HelixConfig": "config",
    "HelixPlugin": "integrations.accelerate.plugin",
    "HelixTrainer": "integrations.trainer.trainer",
    "HelixTrainerMixin": "integrations.trainer.trainer",
    "register_model": "models.registry",
}

__all__ = [
    "HelixConfig",
    "HelixPlugin",
    "HelixTrainer",
    "HelixTrainerMixin",
    "__version__",
    "register_model",
]

set_connections()

if TYPE_CHECKING:
    from hf_helix.config import HelixConfig
    from hf_helix.integrations.accelerate.plugin import HelixPlugin
    from hf_helix.integrations.trainer.trainer import HelixTrainer, HelixTrainerMixin
    from hf_helix.models.registry import register_model


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ImportError as error:
        from hf_helix.integrations.upstream import explain

        explain(error)
        raise
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
