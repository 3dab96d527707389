"""Full gradients of sharded parameters: on a GPU few are alive, and the limit changes no bit."""

import weakref
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.windows_on_fakes import one_rank, train_windows
from transformers import AutoConfig

from hf_helix.config import HelixConfig
from hf_helix.engine.synthetic import Workload
from hf_helix.planning.window.passes import MAX_COPIES
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.gradients.reduce import FlatParameterGradients
from hf_helix.runtime.streams.streams import CpuStreams, CudaStreams

SHARDED: dict[str, Any] = {"shard_parameters": True}


def most_full(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes of flat gradients: of all, and the most that are alive at once; filled while windows run."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    found = {"most": 0, "largest": 0, "all": 0}
    zeros = torch.zeros

    def noted(*sizes: Any, **options: Any) -> torch.Tensor:
        made = zeros(*sizes, **options)
        alive.add(made.untyped_storage())
        found["largest"] = max(found["largest"], made.nbytes)
        found["all"] += made.nbytes
        found["most"] = max(found["most"], sum(each.nbytes() for each in alive))
        return made

    take = FlatParameterGradients.take

    def taken(self: FlatParameterGradients) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "zeros", noted)
            return take(self)

    monkeypatch.setattr(FlatParameterGradients, "take", taken)
    return found


@pytest.mark.parametrize("is_limited", [True, False])
def test_few_full_gradients_are_alive(is_limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one micro-batch; without the limit, streams of a GPU hold all of them until the end of the window."""
    monkeypatch.setattr(CudaStreams, "holds_memory", is_limited)
    found, cuda = most_full(monkeypatch), FakeCuda()
    train_windows(cuda, dp=2, microbatches=1, model={"num_hidden_layers": 8}, plan="sequential", **SHARDED)
    assert not cuda.mistakes
    assert (found["most"] <= (MAX_COPIES + 1) * found["largest"] < found["all"] / 4) is is_limited


def test_few_full_gradients_are_alive_in_a_window_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every micro-batch is reduced; counted in the memory of the tensors themselves."""
    found, cuda = most_full(monkeypatch), FakeCuda()
    often = {**SHARDED, "reduce_gradients": "microbatch"}
    train_windows(cuda, dp=2, microbatches=4, model={"num_hidden_layers": 8}, **often)
    assert not cuda.mistakes
    assert found["most"] <= (MAX_COPIES + 2) * found["largest"] < found["all"] / 16


def test_gradients_of_parameters_go_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every reduction, few layers have gradients; with reductions once in a window, all have."""
    most = {}
    for when in ("window", "microbatch"):
        counts: list[int] = []
        model: list[torch.nn.Parameter] = []
        take = FlatParameterGradients.take

        def counted(self: FlatParameterGradients, counts: Any = counts, model: Any = model, take: Any = take) -> Any:
            counts.append(sum(parameter.grad is not None for parameter in model))
            return take(self)

        with (
            monkeypatch.context() as patched,
            one_rank(
                FakeCuda(),
                dp=2,
                microbatches=4,
                model={"num_hidden_layers": 8},
                reduce_gradients=when,
                **SHARDED,
            ) as (runner, window),
        ):
            patched.setattr(FlatParameterGradients, "take", counted)
            model += runner.rank_units.own_rows
            with plain_parameters():
                runner.train_window(window)
        most[when] = max(counts)
        assert len(model) == 8 * 9 + 3
    assert most["window"] == len(model)
    assert most["microbatch"] <= 4 * 9


def test_the_limit_changes_no_bit(cluster_of: Any) -> None:
    for limited, usual in cluster_of(2).run(gradients_of):
        assert all(torch.equal(*each) for each in zip(limited, usual, strict=True))


# In the processes of a cluster


@plain_parameters()
def gradients_of() -> list[list[torch.Tensor]]:
    """This rank's shards of gradients, with the limit and without."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=64, **sizes)
    found: list[list[torch.Tensor]] = []
    for limited in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(CpuStreams, "holds_memory", limited)
            work = Workload(config, HelixConfig(**SHARDED), torch.device("cpu"))
            work.runner.train_window(work.window(1, 2, 8))
            shards = [shard for flat in work.runner.rank_units.flat_parameters for shard in flat.shards.values()]
            found.append([shard.grad.clone() for shard in shards])
            work.runner.executor.streams.close()
    return found
