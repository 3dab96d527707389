"""The folder of results, and files in it.

In:   `$HELIX_CACHE`, by default `hf_helix` in the cache of Hugging Face.
Out:  a path; files.
Must hold: a file is complete or not there. Imports no torch.
"""

import os
from pathlib import Path

from huggingface_hub.constants import HF_HOME

CACHE_VARIABLE = "HELIX_CACHE"


def cache_root() -> Path:
    """Returns the folder of all results."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(HF_HOME, "hf_helix"))


def write_file(path: Path, text: str) -> None:
    """Writes a file that is complete or not there, also where several processes write it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    os.replace(scratch, path)
