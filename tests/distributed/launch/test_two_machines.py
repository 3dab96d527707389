"""The launch file of a model card starts on two machines as the card says: two launchers of one process each, here."""

import re
from pathlib import Path

import pytest
from support.cards import launch_file
from support.cluster import free_port
from support.launches import output_of, start
from support.paths import ROOT
from support.recipes import MODELS

from hf_helix import HelixConfig
from hf_helix.integrations.trainer.model_card import format_launch


class Card:
    """What `launch_file` reads of a card."""

    def __init__(self, text: str) -> None:
        self.text = text


@pytest.mark.slow
def test_the_card_of_two_machines_starts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    card = Card(format_launch(HelixConfig(tp_size=2, plan="greedy"), 2, "no", use_cpu=True))
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    (command,) = re.findall(r"`accelerate (launch .*) YOUR_SCRIPT.py`", card.text)
    words = command.replace("FILE", str(launch_file(card, tmp_path))).replace("HOST", "127.0.0.1")
    words += f" --main_process_port {free_port()}"  # of a machine that other tests share
    flags = ["--config_name", MODELS / "tiny-llama", "--sequence_length", 32, "--max_steps", 2, "--output_dir", "out"]
    recipe = [ROOT / "recipes" / "pretrain.py", *flags]
    commands = (words.replace("RANK", rank).split()[1:] for rank in ("0", "1"))
    started = [start(tmp_path, ["-m", "accelerate.commands.launch", *given, *recipe]) for given in commands]
    said = [output_of(process, 200) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "tp=2" in (tmp_path / "out" / "README.md").read_text()
    assert "--machine_rank RANK --main_process_ip HOST" in (tmp_path / "out" / "README.md").read_text()
