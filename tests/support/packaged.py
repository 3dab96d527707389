"""What a user of the wheel runs first: `make package` and test_package.py run it by a Python that has the wheel and not
the clone.

In:   the README's example, the launcher's files and the demo's command of the clone; `--without_demo` leaves the demo
      out, which takes minutes.
Out:  an exit status.
Must hold: hf_helix comes from the wheel.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
EXAMPLE = """\
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
folder, dataset = "tiny", Dataset.from_dict({"input_ids": [list(range(32))] * 64, "labels": [list(range(32))] * 64})
LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(folder)
"""


def run(folder: Path, command: str) -> str:
    """The output of a command in a folder, with the programs of this environment and nothing of the clone."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    print(f"$ {command}", flush=True)
    return subprocess.run(
        shlex.split(command), cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def readme_example() -> str:
    """The README's script after its change, with a model and data in front."""
    (change,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = "\n".join(line[1:] for line in change.splitlines() if not line.startswith("-"))
    here = "TrainingArguments(use_cpu=True, max_steps=2, "  # the README's machine has GPUs
    return f"{EXAMPLE}{script.replace('TrainingArguments(', here)}\n"


def main() -> None:
    """Ends with an error where anything fails."""
    demo = re.search(r"^demo:.*\n\t(.*)\\\n\t+(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert demo is not None, "the Makefile has no target demo of one command in two lines"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("recipes", "accelerate_configs"):
            (folder / part).symlink_to(ROOT / part)
        where = run(folder, "python -c 'import hf_helix; print(hf_helix.__file__)'").strip()
        assert Path(where).is_relative_to(BIN.parent), f"hf_helix comes from {where}, not from the wheel"
        print(run(folder, "hf-helix env"))
        (folder / "example.py").write_text(readme_example())
        run(folder, "accelerate launch --config_file accelerate_configs/cpu_tp2.yaml example.py")
        if "--without_demo" in sys.argv:
            return
        print(run(folder, "".join(demo.groups()).replace("$(BIN)/", "")))
        assert (folder / "runs" / "demo" / "helix" / "page.html").is_file()


if __name__ == "__main__":
    main()
