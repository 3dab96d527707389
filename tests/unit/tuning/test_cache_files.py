"""Files of the cache are written under names that nobody can guess, and links are replaced, not followed."""

import os
from pathlib import Path
from unittest import mock

import pytest

from hf_helix.tuning.cache import write_file


def test_links_are_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("plan.json", f"plan.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(mine)
    write_file(tmp_path / "plan.json", "{}")
    assert mine.read_text() == "mine"
    assert (tmp_path / "plan.json").read_text() == "{}"
    assert not (tmp_path / "plan.json").is_symlink()


def test_processes_of_one_number_write_files_of_their_own(tmp_path: Path) -> None:
    """As in two containers; and nothing is left of one that fails."""
    replace, names = os.replace, list[str]()

    def note(source: Path, target: Path) -> None:
        names.append(source.name)
        if len(names) == 1:
            write_file(tmp_path / "plan.json", "another")
        replace(source, target)

    with mock.patch("os.replace", note):
        write_file(tmp_path / "plan.json", "one")
    assert len(set(names)) == 2
    assert (tmp_path / "plan.json").read_text() == "one"
    with mock.patch("os.replace", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        write_file(tmp_path / "plan.json", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
