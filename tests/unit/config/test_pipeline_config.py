"""Options of pipelines from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_helix import HelixConfig
from hf_helix.planning.schedule.named import PLACEMENT_OF
from hf_helix.planning.schedule.placement import FOLD, LINEAR, split_layers, stage_ranks
from hf_helix.runtime.distributed.mesh import check_world


def write(folder: Path, text: str) -> Path:
    path = folder / "helix.yaml"
    path.write_text(text)
    return path


def test_options_of_a_pipeline_in_yaml(tmp_path: Path) -> None:
    text = "pp_size: 2\nschedule: dualpipe_v\nlayers_per_stage: [2, 1, 1, 2]\nshard_optimizer: true\n"
    config = HelixConfig.from_file(write(tmp_path, text))
    expected = HelixConfig(pp_size=2, schedule="dualpipe_v", layers_per_stage=(2, 1, 1, 2), shard_optimizer=True)
    assert config == expected


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("layers_per_stage: 4", TypeError, "layers_per_stage must be a list of whole numbers"),
        ("layers_per_stage: [2, two]", TypeError, "layers_per_stage must be a list of whole numbers"),
        ("shard_optimizer: 1", TypeError, "shard_optimizer must be true or false"),
        ("schedule: 1f1", ValueError, "did you mean '1f1b'?"),
        ("pp_sise: 2", ValueError, "did you mean 'pp_size'?"),
        ("pp_size: two", TypeError, "pp_size must be a whole number"),
    ],
)
def test_wrong_options_name_the_file(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(error) as caught:
        HelixConfig.from_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("schedule", PLACEMENT_OF)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_split_that_an_error_suggests_is_taken(schedule: str, num_ranks: int) -> None:
    ranks = stage_ranks(PLACEMENT_OF[schedule], num_ranks)
    assert len(ranks) == num_ranks * {FOLD: 2, LINEAR: 1}[PLACEMENT_OF[schedule]]
    with pytest.raises(ValueError, match="such as layers_per_stage=") as caught:
        split_layers(13, ranks, head_cost=1.5, layers_per_stage=[13])
    suggested = yaml.safe_load(str(caught.value).rpartition("layers_per_stage=")[2])
    HelixConfig(pp_size=num_ranks, layers_per_stage=suggested)
    stages = split_layers(13, ranks, layers_per_stage=suggested)
    assert [len(stage) for stage in stages] == suggested


@pytest.mark.parametrize(
    ("world", "tp", "pp", "message"),
    [
        (4, 1, 3, "pp_size=3 must divide the world size, 4 processes; values that work: 1, 2, 4"),
        (6, 2, 2, "pp_size=2 must divide the 3 processes that tp_size=2 leaves of 6; values that work: 1, 3"),
        (1, 1, 2, "pp_size=2 must divide the world size, 1 process; values that work: 1"),
    ],
)
def test_worlds_that_do_not_divide(world: int, tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match="must divide") as caught:
        check_world(world, tp, pp)
    assert message in str(caught.value)
    assert ("accelerate launch --num_processes N" in str(caught.value)) == (world == 1)
