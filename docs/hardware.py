"""Asks the doctor for the README's table "On your hardware": `python docs/hardware.py` writes docs/hardware.json.

In:   Llama-3.1-8B's shape in recipes/models, and cluster files of the package.
Out:  by command, the best layout, its tokens per second and gain over one strand, and the best rival's.
Must hold: a row is what the command prints. tests/docs compares the file with new answers (slow).
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from hf_helix.doctor.rivals import RIVALS

ROOT = Path(__file__).parent.parent
ANSWERS = ROOT / "docs" / "hardware.json"
MACHINES = ("l40sx8", "rtx4090x8", "a100x8 --gpus 16 --network 100gbit")
TRAINED = ("", " --lora_r 16")


def command_of(machine: str, trained: str) -> str:
    """Returns the command whose answer is a row."""
    return f"hf-helix doctor --model recipes/models/llama-8b --cluster {machine} --batch_tokens 512k{trained}"


def ask(command: str) -> dict[str, str]:
    """Returns the parts of a command's answer that the table shows."""
    words = [sys.executable, "-m", "hf_helix", *shlex.split(command)[1:]]
    answer = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    row = r"^(?P<name>.{2,27}?)\s{2,}.*?\s(?P<rate>[\d,]+)\s+(?P<share>\d+)%\s+[\d.]+%"
    rows = [match.groupdict() for match in re.finditer(row, answer, re.MULTILINE)]
    rival = max((each for each in rows if each["name"] in RIVALS), key=_rate, default=None)
    best = max((each for each in rows if each["name"] not in RIVALS), key=_rate)
    gain = re.search(r"two strands are ([\d.]+)x", answer)
    return {
        "layout": best["name"],
        "rate": best["rate"],
        "gain": f"{gain[1]}x" if gain else "none",
        "rival": f"{rival['name']}: {rival['rate']}" if rival else "none fits",
    }


def _rate(row: dict[str, str]) -> int:
    return int(row["rate"].replace(",", ""))


def answers() -> dict[str, dict[str, str]]:
    """Returns the rows, by command."""
    commands = [command_of(machine, trained) for machine in MACHINES for trained in TRAINED]
    return {command: ask(command) for command in commands}


if __name__ == "__main__":
    ANSWERS.write_text(json.dumps(answers(), indent=2) + "\n")
