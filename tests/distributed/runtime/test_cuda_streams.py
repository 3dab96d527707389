"""`CudaStreams` itself, with real models and real c10d calls, on stand-ins for CUDA's streams: nothing is read, written
or freed before what came first is over, in any layout, under any plan; the host never waits in a window of a dense
model; and the watch sees the mistakes that could be made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.windows_on_fakes import CPU, MICROBATCHES, train_windows

from hf_helix.config import AUTO, RULES
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.schedule.named import PLACEMENT_OF
from hf_helix.runtime.executor import Executor
from hf_helix.runtime.streams import streams
from hf_helix.runtime.streams.streams import CudaStreams

Case = dict[str, Any]

BF16 = torch.bfloat16
LAYOUTS: dict[str, Case] = {
    "alone": {},
    "tp": {"tp_size": 2},
    "cp": {"cp_size": 2, "rank": 1},
    "cp by gathers": {"cp_size": 2, "cp_method": "all_gather"},
    "tp cp": {"tp_size": 2, "cp_size": 2, "inter_node_axes": ("cp",)},
    "zero": {"dp": 2, "tp_size": 2, "shard_optimizer": True},
    "zero, states on the host": {"dp": 2, "tp_size": 2, "shard_optimizer": True, "offload": "optimizer"},
    "sharded parameters": {"dp": 2, "shard_parameters": True, "inter_node_axes": ("dp",)},
    "sharded parameters of experts": {"dp": 2, "shard_parameters": True, "family": "phimoe"},
    "streamed": {"tp_size": 2, "dp": 2, "offload": "parameters"},
    "streamed, sharded parameters": {"dp": 2, "shard_parameters": True, "offload": "parameters"},
    "reduced in every micro-batch": {"dp": 2, "tp_size": 2, "shard_parameters": True, "reduce_gradients": "microbatch"},
    "windows of attention": {"tp_size": 2, "family": "qwen2"},
    "ep": {"family": "phimoe", "dp": 2, "ep_size": 2},
    "ep tp": {"family": "mixtral", "dp": 2, "ep_size": 2, "tp_size": 2, "inter_node_axes": ("ep",)},
    "ep with a capacity": {"family": "phimoe", "dp": 2, "ep_size": 2, "expert_capacity_factor": 1.25},
}
PIPELINES: dict[str, Case] = {
    f"{schedule} rank {rank}": {"pp_size": 2, "schedule": schedule, "rank": rank, "model": {"num_hidden_layers": 4}}
    for schedule in (*PLACEMENT_OF, AUTO)
    for rank in range(2)
}
PIPELINES["streamed"] = {**PIPELINES["folded_1f1b rank 0"], "offload": "parameters"}
PIPELINES["reduced in every micro-batch"] = {
    **PIPELINES["dualpipe_v rank 0"],
    "dp": 2,
    "shard_parameters": True,
    "reduce_gradients": "microbatch",
}
VARIANTS: dict[str, Case] = {
    "plain": {},
    "bf16": {"autocast_dtype": BF16},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "offload": {"recompute": "offload"},
}
QUICK: dict[str, Case] = {
    "tp cp dhelix, recomputed": {**LAYOUTS["tp cp"], "plan": "dhelix", "recompute": "selective"},
    "sharded parameters of experts in bf16": {
        **LAYOUTS["sharded parameters of experts"],
        "autocast_dtype": BF16,
        "recompute": "selective",
    },
    "states on the host in bf16, spread": {**LAYOUTS["zero, states on the host"], "autocast_dtype": BF16},
    "streamed weights in bf16, spread, recomputed": {
        **LAYOUTS["streamed, sharded parameters"],
        "autocast_dtype": BF16,
        "recompute": "full",
    },
    "inputs of layers on the host, in a pipeline": {
        **PIPELINES["1f1b rank 0"],
        "recompute": "offload",
        "autocast_dtype": BF16,
        "plan": "sequential",
    },
    "ep recomputed": {**LAYOUTS["ep"], "recompute": "full"},
    "ep with a capacity": {**LAYOUTS["ep with a capacity"], "plan": "round_robin", "autocast_dtype": BF16},
    "folded_1f1b": {**PIPELINES["folded_1f1b rank 0"], "plan": "round_robin"},
    "dualpipe_v": {**PIPELINES["dualpipe_v rank 1"], "tp_size": 2, "rank": 3},
}

COUNTS = {"experts/moe.py:HostCopy.numbers tolist": 2 * MICROBATCHES}
"""Waits of the host for dropless experts, once in each of two layers for every micro-batch."""


def watched(case: Case, prompt: bool = False) -> FakeCuda:
    cuda = FakeCuda(prompt)
    train_windows(cuda, **case)
    assert cuda.operators > 1000
    return cuda


def check(case: Case, prompt: bool = False) -> None:
    """Memory is used in order, and the host waits for nothing but the rows of dropless experts."""
    cuda = watched(case, prompt)
    assert not cuda.mistakes, "\n".join(map(str, cuda.mistakes[:10]))
    assert not cuda.asynchronous  # they would run on a stream of torch's own, which keeps memory alive by itself
    is_dropless = "expert_capacity_factor" not in case and case.get("family") in ("phimoe", "mixtral")
    assert dict(cuda.waits) == (COUNTS if is_dropless else {})


@pytest.mark.parametrize("name", QUICK)
def test_everything_is_in_order(name: str) -> None:
    """Also where the host finds at once that a send is over, and gives up its memory."""
    check(QUICK[name], prompt=name == "folded_1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", {**LAYOUTS, **PIPELINES})
def test_every_layout_in_every_variant(layout: str, variant: str) -> None:
    """Under one plan each: every plan meets every layout or variant."""
    cases = {**LAYOUTS, **PIPELINES}
    plan = RULES[(list(cases).index(layout) + list(VARIANTS).index(variant)) % len(RULES)]
    for prompt in (False, True) if layout in PIPELINES else (False,):
        check({**cases[layout], **VARIANTS[variant], "plan": plan}, prompt)


# -- mistakes are seen -------------------------------------------------------------------------------------------------


class NothingKept(CudaStreams):
    """Forgets to keep what the communication reads and writes."""

    def issue(self, *args: Any, **options: Any) -> Any:
        event: Any = super().issue(*args, **options)
        event.keep = None
        return event


class ComputeDoesNotWait(CudaStreams):
    def wait(self, event: Any) -> None:
        event.keep = None


class CommunicationDoesNotWait(CudaStreams):
    def _wait_for_computed(self, stream: Any, computed: Any) -> None:
        pass


class AfterIgnored(CudaStreams):
    def issue(self, kind: Kind, work: Any, after: Sequence[Any], label: str, lane: str = "") -> Any:
        return super().issue(kind, work, (), label, lane)


class Deaf(deque[Any]):
    """Takes nothing in."""

    def __iadd__(self, values: Any) -> Deaf:  # type: ignore[override, misc]
        return self


class Forgetful(Executor):
    """Keeps nothing of what is sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sent = Deaf()


STREAMS, EXECUTOR = "support.windows_on_fakes.CudaStreams", "hf_helix.runtime.runner.Executor"
MUTANTS = [
    (STREAMS, NothingKept, {"tp_size": 2}, "FREED"),
    (STREAMS, ComputeDoesNotWait, {"tp_size": 2}, "READ"),
    (STREAMS, CommunicationDoesNotWait, {"tp_size": 2}, "READ"),
    # The average over the copies of the model begins once the sums over tensor-parallel ranks are over.
    (STREAMS, AfterIgnored, LAYOUTS["zero"], "READ"),
    (EXECUTOR, Forgetful, PIPELINES["folded_1f1b rank 0"], "FREED"),
]


@pytest.mark.parametrize(("place", "mutant", "case", "kind"), MUTANTS)
def test_mistakes_are_seen(place: str, mutant: type, case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, mutant)
    assert kind in {mistake.kind for mistake in watched(case).mistakes}


def test_the_watch_sees_what_nothing_orders() -> None:
    """By hand: the same use of memory with and without a wait."""
    cuda = FakeCuda()
    mine = CudaStreams(CPU, cuda)
    value, other = torch.zeros(4), torch.zeros(4)

    def kinds_of_mistakes() -> list[str]:
        return [mistake.kind for mistake in cuda.mistakes]

    with cuda.watch():
        event = mine.issue(Kind.INTRA_NODE, lambda: value.add_(1), (), "add")
        view = value[1:]  # reads nothing
        assert kinds_of_mistakes() == []
        torch.neg(view)
        assert kinds_of_mistakes() == ["READ"]
        assert "test_cuda_streams.py" in str(cuda.mistakes[0])
        mine.wait(event)
        torch.neg(view)
        assert kinds_of_mistakes() == ["READ"]
        mine.issue(Kind.INTRA_NODE, lambda: torch.neg(value), (), "read")
        value.zero_()
        assert kinds_of_mistakes() == ["READ", "WRITE"]
        made = [torch.zeros(4)]
        late: Any = mine.issue(Kind.INTRA_NODE, lambda: made[0].add_(1), (), "add")
        made.clear()
        assert kinds_of_mistakes() == ["READ", "WRITE", "FREED"]
        mine.wait(late)
        made.append(other)
        mine.wait(mine.issue(Kind.INTRA_NODE, lambda: made[0].add_(1), (), "add"))
        made.clear()
        del other
        assert len(kinds_of_mistakes()) == 3


def test_streams_of_a_device_are_cudas() -> None:
    assert CudaStreams(torch.device("cuda", 0))._cuda is torch.cuda
    assert isinstance(streams.make_streams(torch.device("cuda", 0)), CudaStreams)
