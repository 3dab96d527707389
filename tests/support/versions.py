"""What the installed Transformers has: cases of classes that an older one lacks are skipped there, and say why."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

INSTALLED = Version(transformers.__version__)


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skips a case where the installed Transformers is older than what the case is about; from then on, it must pass.

    Args:
        version: of Transformers, the first that has it.
        what: the class or the form of it that is needed.
    """
    reason = f"{what} came with Transformers {version}; installed is {INSTALLED}"
    return pytest.mark.skipif(Version(version) > INSTALLED, reason=reason)
