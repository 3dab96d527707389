"""What benchmarks share: options, the facts of a run, tables, and files of results.

Every benchmark is started as `python -m benchmarks.NAME` from a checkout; README.md of this folder lists all of them.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "triton")
HELP = {
    "hidden": "features of a token",
    "sequence": "tokens of a sequence",
    "batch": "sequences of a micro-batch",
    "microbatches": "of a window",
    "repeats": "rounds that count; medians are taken",
    "timeout": "seconds after which everything is stopped",
}


def options_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with an option for each default; its type, and whether it takes several values, are those of
    the default.

    Args:
        doc: the docstring of the benchmark.
        defaults: by the name of the option.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program()}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        first, several = (default[0], {"nargs": "+"}) if isinstance(default, (list, tuple)) else (default, {})
        text = f"{HELP.get(name, '')} (default: {default})".strip()
        parser.add_argument(f"--{name}", type=type(first), default=default, help=text, **several)
    return parser


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` and `--markdown`, see `save`."""
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file, with hardware and versions")


def llama(hidden: int, layers: int, vocabulary: int = 4096, heads: int = 8, **more: Any) -> Any:
    """Returns the configuration of a Llama, all of whose heads have keys and values of their own unless `more` says so.

    Args:
        hidden: features of a token; an MLP has 2.75 times as many.
        layers: how many.
        vocabulary: tokens.
        heads: of attention.
        more: fields of `LlamaConfig`.
    """
    from transformers import LlamaConfig

    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    return LlamaConfig(**{**sizes, **more})


def program() -> str:
    """Returns the module that was started, such as `benchmarks.plans`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name).removesuffix(".__main__") if spec else "benchmarks"


def facts() -> dict[str, str]:
    """Returns where, when and with what a result is made."""
    import torch

    from hf_helix.cli.env import version_of

    return {
        "command": shlex.join(["python", "-m", program(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "gpu": gpus(),
        "cpu": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process",
        "kernel": platform.release(),
        "load": "{:.2f} {:.2f} {:.2f}".format(*os.getloadavg()),
    }


def processor() -> str:
    """Returns the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpus() -> str:
    """Returns the name, memory and driver of each GPU, and the versions of CUDA and NCCL. CUDA is not started."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if not torch.cuda.is_available() or not (rows := output_of(query).splitlines()):
        return "none"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{'; '.join(rows)}; CUDA {torch.version.cuda}, NCCL {nccl}"


def commit() -> str:
    """Returns the commit of the checkout, and whether tracked files were changed since."""
    found = output_of(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    changed = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]) if found else ""
    return found + (" with changes" if changed else "") or "unknown"


def output_of(command: Sequence[str]) -> str:
    """Returns what a command prints; nothing where the command fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal, with numbers on the right."""
    numbers = [is_number(rows, place) for place in range(len(header))]
    widths = [max(len(cells[place]) for cells in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        sized = zip(cells, widths, numbers, strict=True)
        return "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in sized).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown, with numbers on the right."""
    marks = ["---:" if is_number(rows, place) else "---" for place in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, marks, *rows))


def is_number(rows: Sequence[Sequence[str]], place: int) -> bool:
    """Returns whether all cells of a column that are not empty begin like numbers."""
    cells = [cells[place] for cells in rows if cells[place]]
    return bool(cells) and all(cell[0] in "+-.0123456789" for cell in cells)


def save(options: argparse.Namespace, title: str, doc: str | None, text: str, results: Any) -> None:
    """Writes the files that `--json` and `--markdown` name.

    Args:
        options: of the command.
        title: of the page.
        doc: the docstring of the benchmark, whose second paragraph says how it measures.
        text: the tables.
        results: the figures.
    """
    about = facts()
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    if options.markdown:
        lines = "\n".join(f"- {key}: {value}" for key, value in about.items())
        how = (doc or "").split("\n\n")[1]
        options.markdown.write_text(f"# {title}, {about['date']}\n\n{how}\n\n{lines}\n\n```\n{text}\n```\n")
