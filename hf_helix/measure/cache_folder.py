"""The folder of results, and files in it.

In:   `$HELIX_CACHE`, by default `hf_helix` in the cache of Hugging Face.
Out:  a path; files.
Must hold: a file is complete or not there. Imports no torch.
"""

import os
import uuid
from pathlib import Path

from huggingface_hub.constants import HF_HOME

CACHE_VARIABLE = "HELIX_CACHE"


def cache_root() -> Path:
    """Returns the folder of all results."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(HF_HOME, "hf_helix"))


def write_file(path: Path, text: str) -> None:
    """Writes a file that is complete or not there, also if several processes write it."""
    # A name that nobody can guess, and `x`: a link of that name would be an error, and no file of another is opened.
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with scratch.open("x") as file:
            file.write(text)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
