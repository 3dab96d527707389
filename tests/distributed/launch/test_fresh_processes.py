"""What only a process of its own shows: what is imported, the same order under every hash seed, pipes that close."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.graphs import LLAMA, layout_of, list_scheduled, random_priority, random_times, schedule_of
from support.paths import ROOT
from support.profiles import MODEL, tiny_profile
from support.simulated import case_of, cluster_with, on_meta

from hf_helix.doctor.layouts import Ranking, Search
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.planning.plan.list_scheduler import Priorities
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile_file import save_profile
from hf_helix.runtime.distributed import endings
from hf_helix.runtime.distributed.environment import CONNECTIONS, LOADING


def output_of(script: str, folder: Path = ROOT, **environment: str) -> str:
    command = [sys.executable, "-c", script]
    options = {"cwd": folder, "env": {**os.environ, **environment}, "capture_output": True, "text": True}
    ran = subprocess.run(command, **options, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_plan_and_show_need_no_torch(tmp_path: Path) -> None:
    commands = [["plan", "P"], ["show", "P"], ["show", "Q", "--profile", "P"], ["show", "--schedule", "auto"]]
    save_profile(tiny_profile(), tmp_path / "P")
    make_plan("greedy", tiny_profile(), model=MODEL, mesh={"tp_size": 2, "pp_size": 1}).save(tmp_path / "Q")
    script = f"""
import sys
from hf_helix.planning.plan import search
from hf_helix.planning.rules import dhelix
from hf_helix.cli import main
search.EFFORT, dhelix.MAX_STATES = 20_000, 100
for words in {commands}:
    main(words)
heavy = {{"torch", "transformers", "accelerate", "numpy", "matplotlib"}} & sys.modules.keys()
assert not heavy, heavy
"""
    assert output_of(script, tmp_path)


def test_help_needs_nothing_heavy() -> None:
    commands = [["--help"], ["profile", "--help"], ["models"], ["--version"]]
    script = f"""
import sys
for name in ("torch", "transformers", "accelerate", "huggingface_hub", "tqdm", "matplotlib"):
    sys.modules[name] = None
from hf_helix.cli import main
for words in {commands}:
    try:
        main(words)
    except SystemExit as end:
        assert not end.code
"""
    assert output_of(script)


def test_a_reader_that_has_gone() -> None:
    """`hf-helix show ... | head`: a reader that has seen enough is no error."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        command = [sys.executable, "-m", "hf_helix", "show", "--schedule", "folded_1f1b"]
        ran = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.stderr, ran.returncode) == ("", 0)


@pytest.mark.parametrize(("given", "connections"), [({}, "32"), ({CONNECTIONS: "8"}, "8")])
def test_the_import_alone_sets_the_connections(
    given: dict[str, str], connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CONNECTIONS, LOADING):
        monkeypatch.delenv(name, raising=False)
    script = "import os, sys, hf_helix; "
    script += f"print(os.environ[{CONNECTIONS!r}], {LOADING!r} in os.environ, 'torch' in sys.modules)"
    assert output_of(script, **given).split() == [connections, "False", "False"]


ORDER = """
from support.graphs import LLAMA, layout_of, list_scheduled, random_priority, random_times, schedule_of
from hf_helix.planning.plan.list_scheduler import Priorities
layout = layout_of(LLAMA, 3)
(program,) = list_scheduled(schedule_of(4), layout, Priorities(random_times(layout, 1), random_priority(layout, 2)))
print([(i.microbatch, i.unit, i.operator.part.value, i.operator.name) for i in program])
"""


def test_the_order_of_priorities_is_the_same_in_every_process() -> None:
    layout = layout_of(LLAMA, 3)
    (program,) = list_scheduled(schedule_of(4), layout, Priorities(random_times(layout, 1), random_priority(layout, 2)))
    here = [(i.microbatch, i.unit, i.operator.part.value, i.operator.name) for i in program]
    assert output_of(ORDER, PYTHONHASHSEED="1").strip() == str(here)


def test_one_rank_of_a_host_says_its_error_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "attempt_0" / "1" / "error.json"  # as torchrun names it for rank 1
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    first, second = "rank 1 failed: ValueError: no", "rank 0 failed: ValueError: no"
    assert endings.claim_full_error(first) == first
    script = f"from hf_helix.runtime.distributed import endings; print(endings.claim_full_error({second!r}))"
    assert output_of(script).strip() == first
    assert endings.is_same(first, second)
    assert not endings.is_same(first, "rank 0 failed: ValueError: yes")


HELD_UNTIL_THE_END = """
import threading, time, weakref
import torch, torch.distributed as dist
import hf_helix.runtime.failures.heartbeat

def slowly(_):
    dropping.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, dropping = dist.group.WORLD, threading.Event()
tensors = [torch.ones(1) for _ in range(10_000)]  # so many that `del` comes before gloo lets go of them
last = weakref.ref(tensors[-1], slowly)
group.allreduce_coalesced(tensors)
del tensors
assert dropping.wait(60)
"""


def test_a_run_ends_well_while_gloo_still_holds_tensors() -> None:
    """Torch aborts a process whose interpreter ends before a thread of gloo has dropped its last tensor."""
    output_of(HELD_UNTIL_THE_END)


# -- the doctor counts and ranks in several processes, and finds what one finds ---------------------------------------

CLUSTER = cluster_with(devices_per_node=2, device={"peak_tflops": {"bf16": 0.05}}, node={"gb_per_s": 1})
LENGTH = 64


def search(workers: int, dtype: str = "bf16") -> Ranking:
    paper = SimulatedModel(on_meta(), CLUSTER)
    usual = case_of(length=LENGTH, dtype=dtype)
    return Search(paper, CLUSTER, 32 * LENGTH, usual, workers=workers).run()


@pytest.mark.slow
def test_several_processes_find_the_same() -> None:
    result = [search(workers) for workers in (1, 2)]
    assert result[0] == result[1]
    assert len(result[0].steps) > 1


def test_an_error_in_another_process_is_raised() -> None:
    with pytest.raises(ValueError, match=r"has no device\.peak_tflops for fp32"):
        search(2, dtype="fp32")
