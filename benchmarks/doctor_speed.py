"""The time of the doctor's first answer: seconds of CPU, next to other versions of hf_helix.

A question is `hf-helix doctor` with its default options about a published configuration on a cluster that hf_helix
brings, with an empty cache. Seconds are of user and system, of all processes. The versions answer each question in
turn. The fastest layouts are compared with those of the other version: the names, and the largest difference of their
tokens/s. Configurations are rows of tests/unit/doctor/published.jsonl.

    python -m benchmarks.doctor_speed --against ../hf_helix_before
    python -m benchmarks.doctor_speed --models meta-llama/Llama-3.1-8B --clusters h100x8 --markdown table.md
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import ROOT, add_outputs, columns, options_of, save

TABLE = ROOT / "tests" / "unit" / "doctor" / "published.jsonl"
MODELS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
)
CLUSTERS = ("rtx4090x8", "l40sx8", "h100x8", "a100x8 --gpus 4x8 --network 100gbit")
SHOWN = 5  # layouts of the table
NAME = 28  # columns of a layout's name in the table


@dataclass(frozen=True)
class Answer:
    """What one version says of one question."""

    model: str
    cluster: str
    tree: str
    cpu: float  # seconds of all processes
    seconds: float  # of the clock
    layouts: dict[str, float] = field(default_factory=dict)  # tokens/s of the fastest, by name
    error: str = ""


def main() -> None:
    parser = options_of(__doc__, models=MODELS, clusters=CLUSTERS, timeout=1800)
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="folders with other versions of hf_helix")
    add_outputs(parser)
    options = parser.parse_args()
    configurations = {row.pop("name"): row for row in map(json.loads, TABLE.read_text().splitlines())}
    trees, answers = [ROOT, *options.against], list[Answer]()
    for model in options.models:
        for cluster in options.clusters:
            mine = [ask(configurations[model], model, cluster, tree, options.timeout) for tree in trees]
            print("\n".join(map(line_of, mine)), file=sys.stderr, flush=True)
            answers += mine
    text = table_of(answers, len(trees))
    print(text)
    save(options, "The time of the doctor's first answer", __doc__, text, [vars(each) for each in answers])


def ask(configuration: dict[str, object], model: str, cluster: str, tree: Path, timeout: float) -> Answer:
    """Returns the answer of one version in a new process, with an empty cache.

    Args:
        configuration: of the model.
        model: its name.
        cluster: its name, and further options.
        tree: the folder of the version.
        timeout: seconds after which the process is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(configuration))
        command = [sys.executable, "-m", "hf_helix", "doctor", "--model", folder, "--cluster", *cluster.split()]
        env = {**os.environ, "PYTHONPATH": str(tree.resolve()), "HELIX_CACHE": str(Path(folder, "cache"))}
        start, before = time.perf_counter(), os.times()
        try:
            done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout)
            said, error = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            said, error = "", [f"no answer in {timeout:g} s"]
        after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    seconds = time.perf_counter() - start
    return Answer(model, cluster, tree.resolve().name, cpu, seconds, layouts_of(said), "".join(error))


def layouts_of(text: str) -> dict[str, float]:
    """Returns the tokens/s of the first layouts of a table that `hf-helix doctor` printed, by name."""
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith("layout ")), "")
    end = header.find("tokens/s") + len("tokens/s")
    found: dict[str, float] = {}
    for line in lines:
        if len(found) == SHOWN or not line[end - 11 : end].strip().replace(",", "").isdecimal():
            break
        found[line[:NAME].strip()] = float(line[end - 11 : end].replace(",", ""))
    return found


def line_of(answer: Answer) -> str:
    """Returns an answer as a line, while further questions are asked."""
    return f"{answer.model} on {answer.cluster}, {answer.tree}: {answer.cpu:.1f} s of CPU {answer.error}".rstrip()


def table_of(answers: Sequence[Answer], count: int) -> str:
    """Returns a row for each question, with the answers of `count` versions."""
    header, rows = ["model", "cluster", "CPU s"], []
    for other in answers[1:count]:
        header += [f"CPU s of {other.tree}", "ratio", "rows", "tokens/s"]
    for first, *others in (answers[place : place + count] for place in range(0, len(answers), count)):
        row = [first.model, first.cluster, f"{first.cpu:.1f}"]
        for other in others:
            row += [f"{other.cpu:.1f}", f"{other.cpu / first.cpu:.1f}", *compared(first, other)]
        rows.append(row)
    return columns(header, rows)


def compared(first: Answer, other: Answer) -> tuple[str, str]:
    """Returns whether two answers have the same layouts in the same order, and the largest difference of tokens/s."""
    if first.error or other.error:
        return first.error or other.error, ""
    names = first.layouts.keys() & other.layouts.keys()
    off = max((abs(first.layouts[name] / other.layouts[name] - 1) for name in names), default=0.0)
    return "same" if list(first.layouts) == list(other.layouts) else "different", f"{off:.3%}"


if __name__ == "__main__":
    main()
