"""The operators that traces become: where ranks communicate, and what runs in one."""

from collections.abc import Callable

import pytest
import torch
import transformers
from support import small_modules as modules
from support.small_traces import check_on_two_ranks, steps, unit_of
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.models.small_config import default_config
from hf_helix.operators.autograd_operator import AutogradOperator
from hf_helix.operators.communication.transport import Axis
from hf_helix.operators.explicit import GatedSilu
from hf_helix.operators.linears.linear import Linear

IN_TURN = ["first", "gather", "attention.q+k+v", "attention", "attention.out", "scatter", "add"]
IN_TURN += ["second", "gather", "mlp.gate+up", "mlp.mul", "mlp.down", "scatter", "add.2"]


def test_a_layer_gathers_and_scatters_twice() -> None:
    """As Llama is declared: linears of one value run in one, glue belongs to attention or to what reads it."""
    module = modules.Layer()
    assert steps(unit_of(module)) == IN_TURN
    check_on_two_ranks(module)


def test_one_rank_does_not_communicate() -> None:
    alone = steps(unit_of(modules.Layer(), axis=Axis.single()))
    assert alone == [step for step in IN_TURN if step not in ("gather", "scatter")]


def test_a_value_that_several_read_is_gathered_once() -> None:
    """Partial sums are added up before they are scattered."""
    module = modules.OneNormLayer()
    assert [steps(unit_of(module)).count(step) for step in ("gather", "scatter")] == [1, 1]
    check_on_two_ranks(module)


def test_norms_of_one_value_read_one_gather() -> None:
    """As GPT-NeoX is declared: every rank norms the whole sequence."""
    module = modules.ParallelLayer()
    result = steps(unit_of(module))
    assert [result.count(step) for step in ("gather", "scatter")] == [1, 1]
    assert result.index("gather") < min(result.index("first"), result.index("second"))
    check_on_two_ranks(module)


class Twice(nn.Module):
    """A sum that is read as a term of another, and by an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = modules.Mlp(), modules.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.one(x)
        return h + self.other(h)


def test_a_sum_that_others_read_is_a_value_of_its_own() -> None:
    assert steps(unit_of(Twice())).count("scatter") == 2
    check_on_two_ranks(Twice())


class Activated(modules.Mlp):
    """With a module of Transformers as activation."""

    def __init__(self, name: str = "silu") -> None:
        super().__init__()
        self.act_fn = ACT2FN[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_a_gate_with_silu_runs_with_its_own_backward(name: str) -> None:
    module = Activated(name)
    (operator,) = [each for each in unit_of(module).operators.values() if isinstance(each, AutogradOperator)]
    assert isinstance(operator.explicit, GatedSilu)
    assert operator.explicit.applies(*torch.randn(2, 3, 1, 4)) == (name == "silu")
    check_on_two_ranks(module)


class OfOneValue(nn.Module):
    """Linears that read one value: two of one submodule, one of another, one with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.fused = modules.Mlp(), modules.FusedMlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.fused(x)


def test_linears_of_one_value_and_one_submodule_are_one_operator() -> None:
    unit = unit_of(OfOneValue())
    linears = [op.name for op in unit.graphs.forward.operators if isinstance(unit.operators[op.name], Linear)]
    assert sorted(linears) == ["fused.down", "fused.gate_up", "one.down", "one.gate+up"]
    assert [steps(unit).count(step) for step in ("gather", "scatter")] == [1, 1]
    check_on_two_ranks(OfOneValue())


# -- glue --------------------------------------------------------------------------------------------------------------


class Written(modules.Attention):
    """Code that writes down numbers of heads, of tokens and of sequences."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, modules.HEADS, modules.HEAD_DIM).transpose(1, 2)
        k, v = (p(x).reshape(batch, tokens, modules.KEY_HEADS, -1).transpose(1, 2) for p in (self.k, self.v))
        attend = modules.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", modules.eager_attention_forward)
        result, _ = attend(self, q, k, v, None, dropout=0.0, scaling=self.scaling)
        return self.out(result.reshape(batch, tokens, modules.HEADS * modules.HEAD_DIM))


@pytest.mark.parametrize("length", [2, 6, 14])
def test_numbers_of_heads_are_those_of_a_rank_and_the_length_stays_open(length: int) -> None:
    check_on_two_ranks(Written(), length)


class Cast(nn.Module):
    """Computes in fp32 and goes back to the type of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(functional.softplus(h.float()).to(h.dtype) + torch.ones(1, dtype=h.dtype, device=h.device))


def test_what_is_cast_to_the_type_of_the_trace_gets_that_of_the_values() -> None:
    """The trace is made in bf16; a value in fp32 must not be rounded to it."""
    check_on_two_ranks(Cast())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_weights_that_only_indices_depend_on_get_no_gradient(name: str) -> None:
    """As in Transformers, so that weight decay leaves them alone; GLM-5 hands indices from layer to layer."""
    kind = getattr(transformers, name)
    stock, ours = kind(default_config(name)), kind(default_config(name))
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    stock(input_ids=ids, labels=ids).loss.backward()
    family_of(ours).units(ours, ParallelContext())
    idle = {name for name, parameter in stock.named_parameters() if parameter.grad is None}
    assert idle == {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert any("indexer" in name for name in idle)


# -- tokens and rows -----------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Code that lets a token see others, outside of attention."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(8, 12), nn.Linear(12, 8), mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.mix(x))))


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: x + functional.pad(x, (0, 0, 1, -1)),
    "cat": lambda x: x + torch.cat([x[:, :1], x[:, :-1]], 1),
    "slice": lambda x: x + x[:, -1:],
    "select": lambda x: x + x[:, 0].unsqueeze(1),
    "mean of rows": lambda x: x - x.mean(0, keepdim=True),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "diff": lambda x: x + x.diff(dim=1, prepend=x[:, :1]),
    "einsum": lambda x: x + torch.einsum("bst,btd->bsd", torch.einsum("bsd,btd->bst", x, x).softmax(-1), x),
    "group norm": lambda x: functional.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "cumsum": lambda x: x.cumsum(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "std": lambda x: x / (1 + x.std(dim=1, keepdim=True)),
    "vector norm": lambda x: functional.normalize(x, dim=1),
    "norm": lambda x: x / (1 + torch.norm(x, 3.0, dim=1, keepdim=True)),
    "min": lambda x: x - x.min(dim=1, keepdim=True).values,
    "sort": lambda x: x.sort(stable=True, dim=1).values,
    "nansum": lambda x: x - x.nansum(1, keepdim=True).sin(),
    "median": lambda x: x * x.median(1).values.unsqueeze(1),
}


@pytest.mark.parametrize("name", MIXES)
def test_code_along_tokens_or_rows_runs_on_the_full_sequence(name: str) -> None:
    """A rank's part of the sequence has other neighbours, and operators have tokens before rows."""
    check_on_two_ranks(Mixing(MIXES[name]))


class Positions(Mixing):
    """A table of positions that the length of the sequence cuts."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.table = nn.Parameter(torch.zeros(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[: x.shape[1]])


def test_rows_of_a_table_are_those_of_the_tokens() -> None:
    check_on_two_ranks(Positions())
