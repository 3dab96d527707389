"""A window whose steady state is repeated gives the bits of the same window with every instruction written out."""

import pytest
import torch
from support.models import llama

from hf_helix.config import HelixConfig
from hf_helix.models.batch_inputs import SequenceCut
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.planning.plan.registry import make_plan
from hf_helix.planning.schedule.scheduler import Scheduler
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.planning.window.program import Program
from hf_helix.runtime.distributed.mesh import mesh_of
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.rank_units import place_units
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams import make_streams

COUNT = 30


@pytest.mark.parametrize("rule", ["sequential", "greedy"])
def test_repeated_stretches_give_the_same_bits(rule: str) -> None:
    model = llama(num_hidden_layers=2).train()
    family = family_of(model)
    rank_units = place_units(family.units(model, ParallelContext()))
    mesh = mesh_of(HelixConfig(), "cpu")
    plan = make_plan(rule, rough_profile(rank_units.layout), model=family.model_class, mesh=HelixConfig().option_sizes)
    window = []
    for place in range(COUNT):
        ids = torch.randint(100, (2, 3 + place % 4), generator=torch.Generator().manual_seed(place))
        side = family.side_inputs(model, {"input_ids": ids, "labels": ids}, SequenceCut(1), torch.tensor(0.02))
        window.append(MicroBatch(lambda side=side: side, (0, place)))
    result = []
    for written_out in (False, True):
        runner = Runner(rank_units, plan, mesh, make_streams(mesh.device), Scheduler("folded_1f1b", 1), 0)
        program = runner.program(COUNT)
        assert program.repeats > COUNT // 2
        if written_out:
            runner._programs[COUNT] = Program(list(program))
        model.zero_grad()
        losses = torch.stack(runner.train_window(window))
        result.append((losses, [parameter.grad.clone() for parameter in model.parameters()]))
    (losses, gradients), (expected, wanted) = result
    assert len(set(losses.tolist())) == COUNT
    assert torch.equal(losses, expected)
    assert all(map(torch.equal, gradients, wanted))
