"""HelixConfig(compile=True) changes the kernels and not the results, and compiles once for all layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.derived_models import HOME
from support.models import tiny
from torch._dynamo.utils import counters

from hf_helix.config import HelixConfig
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.models.stock import stock_modules
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.operators import autograd_operator
from hf_helix.operators.vocabulary.loss import TokenStatistics
from hf_helix.operators.vocabulary.statistics import CHUNK
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.rules.registry import make_plan
from hf_helix.planning.timing.profile import rough_profile
from hf_helix.runtime.distributed.mesh import mesh_of
from hf_helix.runtime.microbatch import MicroBatch
from hf_helix.runtime.rank_units import place_units
from hf_helix.runtime.runner import Runner
from hf_helix.runtime.streams.streams import make_streams

LENGTHS = (12, 16, 9)
"""Of the micro-batches of a window: three shapes."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Everything of `torch.compile` but the code generator, unless a test asks for it."""
    monkeypatch.setattr(autograd_operator, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train(model: Any, compile: bool, autocast_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a window, and all gradients behind one another."""
    family = family_of(model.train())
    rank_units = place_units(family.units(model, ParallelContext(compile=compile)))
    mesh = mesh_of(HelixConfig(), "cpu")
    plan = make_plan(
        "sequential", rough_profile(rank_units.layout), model=family.model_class, mesh=HelixConfig().option_sizes
    )
    runner = Runner(rank_units, plan, mesh, make_streams(mesh.device), Scheduler("folded_1f1b", 1), 0, autocast_dtype)
    window = []
    for place, length in enumerate(LENGTHS):
        ids = torch.randint(100, (2, length), generator=torch.Generator().manual_seed(place))
        batch = {"input_ids": ids, "labels": ids}
        side = family.side_inputs(model, batch, SequenceCut(1), torch.tensor(0.02))
        window.append(MicroBatch(lambda side=side: side, (0, place)))
    model.zero_grad()
    losses = torch.stack(runner.train_window(window))
    return losses, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


def check(result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Losses and gradients."""
    assert counters["stats"]["unique_graphs"] > 0
    assert all(distance(*pair) <= 1e-6 for pair in zip(result, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", f"{HOME}gpt_oss", f"{HOME}deepseek_v3"])
def test_results_are_those_without(family: str) -> None:
    model = tiny(family)
    plain = train(model, compile=False)
    check(train(model, compile=True), plain)


@pytest.mark.slow
def test_layers_share_a_compilation_and_shapes_do_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, rope, activation, and of the loss three: each once, and once more when a second shape comes.

    The layers of a second model have nothing left to compile. The results are those without.
    """
    model = tiny("llama", num_hidden_layers=3)
    plain = train(model, compile=False)
    monkeypatch.setattr(stock_modules, "DEVICES", {"cpu"})  # as on CUDA
    train(tiny("llama", num_hidden_layers=1), compile=True)
    of_one = counters["stats"]["unique_graphs"]
    check(train(model, compile=True), plain)
    assert counters["stats"]["unique_graphs"] == of_one <= 12
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "autocast_dtype"), [("llama", None), ("llama", torch.bfloat16), (f"{HOME}gemma2", torch.bfloat16)]
)
def test_generated_code(family: str, autocast_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the error against fp32 is at most twice that without compilation."""
    monkeypatch.setattr(autograd_operator, "COMPILER", "inductor")
    model = tiny(family)
    exact = train(model, compile=False)
    plain = [
        distance(*pair) for pair in zip(train(model, compile=False, autocast_dtype=autocast_dtype), exact, strict=True)
    ]
    result = [
        distance(*pair) for pair in zip(train(model, compile=True, autocast_dtype=autocast_dtype), exact, strict=True)
    ]
    assert result[0] <= max(1e-5, 2 * plain[0])
    assert result[1] <= max(1e-4, 2 * plain[1])


def test_the_loss_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is written, of the first shape and of later ones."""
    monkeypatch.setitem(CHUNK, "cpu", 16 * 64)

    def statistics_and_gradient(tokens: int, wrap: Any) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(tokens)
        logits = torch.randn(tokens, 2, 64, generator=draws)
        targets = torch.randint(64, (tokens, 2), generator=draws)
        operator = TokenStatistics(0, 64, overwrites=True, wrap=wrap)
        ctx = SimpleNamespace(side={"targets": targets}, saves_for_backward=True, saved=None)
        (statistics,) = operator.forward(ctx, logits)
        return statistics, operator.backward(ctx, torch.randn(statistics.shape, generator=draws))[0]

    for tokens in (8, 32, 33):  # one chunk, several, and a last one that is smaller
        result = statistics_and_gradient(tokens, autograd_operator.compiled)
        expected = statistics_and_gradient(tokens, lambda function: function)
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
