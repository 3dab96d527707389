"""Comparisons of two trainings, and of two folders of weights."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig


def compare_runs(result: dict[str, Any], expected: dict[str, Any], steps: int = 6, factor: float = 1.0) -> None:
    """Both trained alike for at least so many steps: rates exactly, losses to 1e-5, norms of gradients to 1e-4, or by a
    factor less exactly."""
    assert result["steps"] == expected["steps"] >= steps
    assert result["rates"] == expected["rates"]
    np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=factor * 1e-5)
    np.testing.assert_allclose(result["norms"], expected["norms"], rtol=factor * 1e-4)
    np.testing.assert_allclose(result["eval"], expected["eval"], rtol=0, atol=factor * 1e-5)


def compare_gradients(
    result: Mapping[str, Any], expected: Mapping[str, Any], what: str = "", floor: float = 0.0
) -> None:
    """Every gradient by name to 1e-4 of its norm.

    Args:
        result: None for a gradient that another rank holds.
        what: ran here, for the error.
        floor: of the distance that is allowed, in parts of the norm of all gradients.
    """
    assert result.keys() == expected.keys(), what
    least = 1e-12 + floor * np.sqrt(sum(np.sum(each.astype(np.float64) ** 2) for each in expected.values()))
    for name, gradient in expected.items():
        if result[name] is None:
            continue
        distance, norm = np.linalg.norm(result[name].astype(np.float64) - gradient), np.linalg.norm(gradient)
        assert distance <= 1e-4 * norm + least, f"{what}: {name} differs by {distance:.1e} of {norm:.1e}"


def compare_weights(folder: Path | str, expected_folder: Path | str, factor: float = 1.0) -> None:
    """Both load as plain Transformers checkpoints with the same names and the same values to 1e-4 of their norms, or by
    a factor less exactly."""
    (name,) = AutoConfig.from_pretrained(expected_folder).architectures
    ours, theirs = (
        getattr(transformers, name).from_pretrained(each).state_dict() for each in (folder, expected_folder)
    )
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        distance = torch.linalg.vector_norm(ours[name].double() - weight.double())
        assert distance <= factor * 1e-4 * torch.linalg.vector_norm(weight.double()), name


def compare_adapters(ours: Path, theirs: Path, factor: float = 1.0) -> None:
    """Two folders of PEFT's have the same files, names and configurations, and values to 1e-4 of their norms, or by a
    factor less exactly."""

    def files(folder: Path) -> set[Path]:
        found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {path for path in found if path.parts[0] != "runs"}

    assert files(ours) == files(theirs)
    for file in sorted(files(theirs)):
        if file.name == "adapter_config.json":
            mine, stocks = (json.loads((folder / file).read_text()) for folder in (ours, theirs))
            for config in (mine, stocks):
                for name in ("target_modules", "target_parameters"):
                    config[name] = sorted(config[name] or ())  # a set
            assert mine == stocks
        if file.suffix == ".safetensors":
            mine, stocks = (load_file(folder / file) for folder in (ours, theirs))
            assert mine.keys() == stocks.keys()
            for name, weight in stocks.items():
                assert mine[name].dtype is weight.dtype
                distance = torch.linalg.vector_norm(mine[name].double() - weight.double())
                assert distance <= factor * 1e-4 * torch.linalg.vector_norm(weight.double()), name


def assert_same_bits(result: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Of losses and whole gradients."""
    assert result["losses"] == other["losses"]
    for name, gradient in other["gradients"].items():
        np.testing.assert_array_equal(result["gradients"][name], gradient, err_msg=name)


def compare_predictions(result: dict[str, Any], expected: dict[str, Any], with_loss: bool) -> None:
    """Labels, logits and metrics are those of the stock Trainer; `with_loss` where batches are the same."""
    np.testing.assert_array_equal(result["label_ids"], expected["label_ids"])
    np.testing.assert_allclose(result["predictions"], expected["predictions"], rtol=0, atol=1e-5)
    assert len(result["seen"]) == 2  # once by predict, once by evaluate
    for labels in result["seen"]:
        np.testing.assert_array_equal(labels, expected["label_ids"])
    for kind in ("predicted", "evaluated"):
        assert result[kind].keys() == expected[kind].keys()
        for name, value in result[kind].items():
            if with_loss or not name.endswith("_loss"):
                assert value == pytest.approx(expected[kind][name], abs=1e-5), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file, each once."""
    result: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert not result.keys() & file.keys()
            result.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return result


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name], tensor), name


TIMES = ("runtime", "per_second", "preparation_time")


def plain(value: Any) -> Any:
    """Without what is another number in every run, and without tensors."""
    if isinstance(value, dict):
        return {
            str(key): plain(item)
            for key, item in value.items()
            if not str(key).endswith(TIMES) and not str(key).startswith("helix/")
        }
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in (sorted(value) if isinstance(value, set) else value)]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def is_close(result: Any, expected: Any, tolerance: float = 1e-4) -> bool:
    """Equal but for what another order of sums explains."""
    if isinstance(expected, dict):
        return (
            isinstance(result, dict)
            and result.keys() == expected.keys()
            and all(is_close(result[name], value, tolerance) for name, value in expected.items())
        )
    if isinstance(expected, (list, tuple)):
        is_alike = isinstance(result, (list, tuple)) and len(result) == len(expected)
        return is_alike and all(is_close(*pair, tolerance) for pair in zip(result, expected, strict=True))
    if isinstance(expected, float):
        return isinstance(result, (int, float)) and math.isclose(result, expected, rel_tol=tolerance, abs_tol=1e-5)
    return bool(result == expected)
