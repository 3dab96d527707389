"""Layouts in the words of Transformers and Accelerate: what they become, what they may not contradict."""

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accelerate import ParallelismConfig
from transformers.distributed import DistributedConfig

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.integrations.accelerate import launcher
from hf_helix.integrations.accelerate.launcher import CONFIG_FILE_VARIABLE, resolve_config


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Eight processes; the file of the launcher, which says nothing."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv(CONFIG_FILE_VARIABLE, raising=False)
    path = tmp_path / "launch.yaml"
    path.write_text("num_processes: 8")
    monkeypatch.setattr(launcher, "launcher_config_file", lambda: path)
    return path


class Said(NamedTuple):
    """A layout that is made in the test: older versions of Transformers lack some words."""

    kind: type
    words: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind.__name__} {self.words}"

    def made(self) -> Any:
        if not self.words.keys() <= {each.name for each in dataclasses.fields(self.kind)}:
            pytest.skip("this version of Transformers does not have these words")
        return self.kind(**self.words)


def distributed(**words: Any) -> Said:
    return Said(DistributedConfig, words)


def parallelism(**words: Any) -> Said:
    return Said(ParallelismConfig, words)


def sharded(**options: Any) -> HelixConfig:
    return HelixConfig(shard_parameters=True, **options)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (distributed(tp_size=8), HelixConfig(tp_size=8)),
        (distributed(tp_size=4, pp_size=2), HelixConfig(tp_size=4, pp_size=2)),
        (distributed(fsdp_size=8), sharded()),
        (distributed(tp_size=2, fsdp_size=2, dp_replicate_size=2), sharded(tp_size=2, dp_replicate_size=2)),
        (distributed(tp_size=2, fsdp_size=4, ep_size=4), sharded(tp_size=2, ep_size=2)),
        (distributed(dp_replicate_size=8), HelixConfig()),
        (distributed(tp_size=8, tp_plan="auto", enable_sequence_parallel=True), HelixConfig(tp_size=8)),
        (parallelism(dp_replicate_size=2, dp_shard_size=4), sharded(dp_replicate_size=2)),
        (parallelism(tp_size=2, cp_size=2, dp_shard_size=2), sharded(tp_size=2, cp_size=2)),
        (parallelism(), HelixConfig()),
    ],
    ids=str,
)
def test_a_layout_keeps_its_meaning(said: Said, expected: HelixConfig) -> None:
    given = said.made()
    assert resolve_config(given, None) == resolve_config(None, given) == expected
    assert HelixPlugin(given).config == expected


def test_a_config_adds_what_the_others_cannot_say() -> None:
    ours = HelixConfig(pp_size=2, plan="search")
    both = sharded(tp_size=2, pp_size=2, plan="search")
    assert resolve_config(ours, ParallelismConfig(tp_size=2, dp_shard_size=2)) == both
    assert resolve_config(ParallelismConfig(tp_size=2, dp_shard_size=2), ours) == both
    same = HelixConfig(tp_size=2, shard_parameters=True)
    assert resolve_config(same, ParallelismConfig(tp_size=2, dp_shard_size=4)) == same


def test_files_of_accelerate_config_and_of_the_environment(
    launched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of one stays beside the options of the other."""
    launched.write_text(
        "parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 4, "
        "parallelism_config_cp_backend: torch, helix: {plan: search}}"
    )
    assert resolve_config(None, None) == sharded(tp_size=2, plan="search")
    assert resolve_config(HelixConfig(plan="greedy"), None) == sharded(tp_size=2, plan="greedy")
    launched.write_text("parallelism_config: {parallelism_config_tp_size: 8}")
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(own := tmp_path / "own.yaml"))
    own.write_text("plan: search")
    assert resolve_config(None, None) == HelixConfig(tp_size=8, plan="search")
    launched.write_text("num_processes: 8")
    assert resolve_config(DistributedConfig(tp_size=8), None) == HelixConfig(tp_size=8, plan="search")
    own.write_text("num_processes: 8\nparallelism_config: {parallelism_config_dp_shard_size: 8}")
    assert resolve_config(None, None) == sharded()


WRONG: list[tuple[Any, Any, str]] = [
    (
        HelixConfig(tp_size=4),
        distributed(tp_size=8),
        "DistributedConfig(tp_size=8) says tp_size=8, and the",
    ),
    (distributed(tp_size=8), parallelism(tp_size=2, dp_shard_size=4), "says tp_size=2, and the helix"),
    (HelixConfig(shard_optimizer=True), distributed(fsdp_size=8), "fsdp_size=8): shard_parameters=True with sha"),
    (distributed(tp_size=2), None, "1 data-parallel rank, and 8 processes, 2 for a batch, have 4; use fsdp_size"),
    (parallelism(tp_size=2, dp_shard_size=2), None, "or start 4 processes"),
    (distributed(tp_size=8, tp_plan={}), None, "with tp_plan={}: use None or 'auto'"),
    (distributed(fsdp_size=8, fsdp_cpu_offload=True), None, "fsdp_cpu_offload=True: use False"),
    (distributed(fsdp_size=8, fsdp_mixed_precision=True), None, "with TrainingArguments(bf16=True)"),
    (parallelism(sp_size=2, dp_shard_size=4), None, "sp_size=2: use sp_size=1, and cp_size"),
]


@pytest.mark.parametrize(("given", "plugin", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_contradictions_and_what_cannot_be_honoured_are_errors_by_name(given: Any, plugin: Any, words: str) -> None:
    made = [each.made() if isinstance(each, Said) else each for each in (given, plugin)]
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve_config(*made)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            "{tp_size: 2}",
            "it belongs one level deeper, in parallelism_config: helix: tp_size: 2",
        ),
        ("{helx: {}}", "unknown key 'helx' (did you mean 'helix'?)"),
        ("{parallelism_config_tp_size: 0}", "launch.yaml: parallelism_config: tp_size must be at least 1"),
        ("{parallelism_config_tp_size: 4, helix: {tp_size: 2}}", "says tp_size=4, and the helix options"),
    ],
)
def test_a_wrong_block_of_accelerate_names_its_file_or_the_size(block: str, words: str, launched: Path) -> None:
    launched.write_text(f"parallelism_config: {block}")
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve_config(None, None)
