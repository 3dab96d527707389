"""The ranks of a host, by what launchers leave in the environment."""

import pytest

from hf_helix.runtime.distributed import mesh


@pytest.mark.parametrize(
    ("environment", "on_gpus", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, False, 4),
        ({"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, False, 1),
        ({"LOCAL_WORLD_SIZE": "1"}, True, 1),
        ({"LOCAL_WORLD_SIZE": "1"}, False, 8),  # which Accelerate may have set, for want of another
        ({}, False, 8),
        ({}, True, 8),
    ],
)
def test_ranks_of_a_host(
    environment: dict[str, str], on_gpus: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mesh.torch.cuda, "is_available", lambda: on_gpus)
    monkeypatch.setattr(mesh, "world_size", lambda: 8)
    assert mesh.ranks_of_host() == ranks
