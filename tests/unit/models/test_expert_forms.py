"""Every form of fused experts of Transformers gives what the module's own forward gives; other code is refused."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models
from peft import LoraConfig, get_peft_model
from support.expert_modules import (
    CHOICES,
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    SINCE,
    by_itself,
    cases_of,
    experts_of,
    side_of,
    tokens_of,
    unit_of_experts,
)
from support.units import run_unit
from torch import Tensor, nn
from torch.nn import functional

from hf_helix.models.graph.builder import Builder
from hf_helix.models.graph.context import ParallelContext
from hf_helix.models.graph.experts import ExpertForm, declare_experts, experts_form, is_experts
from hf_helix.operators.base import Precision
from hf_helix.operators.experts import grouped_linear
from hf_helix.planning.parameters import CUT_EXPERTS, EXPERTS

GATED = ExpertForm("gate_up_proj", "down_proj")
BIASED = ExpertForm("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", is_transposed=True)
COMMON = (("mixtral", "MixtralExperts"), ("gemma4", "Gemma4TextExperts"), ("deepseek_v4", "DeepseekV4Experts"))
"""Of the most common form; `test_every_class_of_transformers_is_served` has the others."""
FORMS = {
    **dict.fromkeys(COMMON, GATED),
    ("gpt_oss", "GptOssExperts"): BIASED,
    ("aria", "AriaExperts"): ExpertForm("gate_up_proj", "down_proj", is_transposed=True),
    ("nemotron_h", "NemotronHExperts"): ExpertForm("up_proj", "down_proj", is_gated=False),
    ("muse_spark", "MuseSparkExperts"): ExpertForm("gate_up_proj", "down_proj", norm="post_expert_norm"),
}
DISTINCT = ("gpt_oss", "aria", "nemotron_h", "muse_spark", "deepseek_v4")


def module_of(family: str, **changes: Any) -> Any:
    return experts_of(*next(key for key in FORMS if key[0] == family), **changes)


def in_operators(
    module: Any,
    given: dict[str, Tensor],
    sharing: ParallelContext | None = None,
    recompute: str = "none",
    precision: Precision | None = None,
) -> dict[str, Tensor]:
    """As `by_itself`, operator by operator."""
    module = copy.deepcopy(module)
    unit = unit_of_experts(module, sharing or ParallelContext()).recomputed(recompute)
    inputs = {"x": given["x"], "weights": given["weights"]}
    outputs, gradients = run_unit(unit, inputs, side_of(given), {"experts.out": given["gradient"]}, precision)
    result = {"out": outputs["experts.out"], "d.x": gradients["x"]}
    result["d.weights"] = gradients["weights"]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            result[name] = parameter.grad
    return result


def close(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert (result[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("family", cases_of(family for family, _ in FORMS))
def test_operators_give_what_the_module_gives(family: str) -> None:
    kind = next(key for key in FORMS if key[0] == family)
    module, given = experts_of(*kind), tokens_of(7, 3)
    assert is_experts(module)
    assert experts_form(module) == FORMS[kind]
    close(in_operators(module, given), by_itself(module, given))


@pytest.mark.parametrize("family", cases_of(DISTINCT))
@pytest.mark.parametrize("case", ["capacity", "selective", "full"])
def test_with_room_for_all_and_recomputed(family: str, case: str) -> None:
    module, given = module_of(family), tokens_of(7, 3)
    sharing = ParallelContext(capacity_factor=NUM_EXPERTS / CHOICES) if case == "capacity" else None
    mode = case if case in ("selective", "full") else "none"
    close(in_operators(module, given, sharing, mode), by_itself(module, given))


def test_tokens_without_room_leave_no_trace_in_biases() -> None:
    """Empty rows pass the biases, and nothing of them comes back or has a gradient."""
    module, given = module_of("gpt_oss"), tokens_of(7, 3)
    given["chosen"][:, 0], given["chosen"][:, 1] = 0, 2
    sharing = ParallelContext(capacity_factor=1.0)
    room = -(-21 * CHOICES // NUM_EXPERTS)
    kept = torch.arange(21).unsqueeze(1) < room
    dropped = {**given, "weights": given["weights"] * kept}
    expected, result = by_itself(module, dropped), in_operators(module, given, sharing)
    expected["d.weights"] = expected["d.weights"] * kept
    close(result, expected)


@pytest.mark.parametrize("family", cases_of(DISTINCT))
def test_bf16_is_as_exact_as_the_module(family: str) -> None:
    """Matrices in bf16, the rest in fp32, against the module under autocast. Its biases never meet bf16; rows that are
    rounded to bf16 once before they are summed are as good.
    """
    module, given = module_of(family), tokens_of(40, 3)
    if hasattr(module, "limit"):  # far away: what bf16 rounds to a bound of `clamp` has no gradient since torch 2.14
        module.limit = 100.0
    exact, stock = by_itself(module, given), by_itself(module, given, autocast=True)
    result = in_operators(module, given, precision=Precision("cpu", torch.bfloat16))
    for name, value in exact.items():
        assert (result[name] - value).norm() <= 2 * (stock[name] - value).norm() + 2**-9 * value.norm(), name


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "nemotron_h"])
def test_one_kernel_for_all_experts_gives_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with torch's grouped GEMM for the CPU. It rounds to bf16 once more, before the bias is added."""
    width = {"intermediate_size": 16, "moe_intermediate_size": 16}  # rows of 16 bytes
    module, given = module_of(family, **width), tokens_of(40, 3)
    apart = in_operators(module, given, precision=Precision("cpu", torch.bfloat16))
    monkeypatch.setattr(grouped_linear, "_in_one_kernel", lambda rows: True)
    together = in_operators(module, given, precision=Precision("cpu", torch.bfloat16))
    for name, value in apart.items():
        assert (together[name] - value).norm() <= 2**-7 * value.norm(), name


def adapted(module: nn.Module, rank: int = 3) -> Any:
    """The module in PEFT's wrappers, with adapters that are far from zero, one idle, of which only one is trained."""
    names = [f"experts.{name}" for name, value in module.named_parameters() if value.dim() == 3]
    options = {"target_modules": [], "target_parameters": names, "lora_alpha": 5, "init_lora_weights": False}
    torch.manual_seed(4)
    model = get_peft_model(nn.ModuleDict({"experts": module}), LoraConfig(r=rank, **options))
    model.add_adapter("idle", LoraConfig(r=2, **options))
    return model.base_model.model.experts


def by_peft(module: nn.Module, given: dict[str, Tensor], autocast: bool = False) -> dict[str, Tensor]:
    """As `by_itself`, without the gradients of frozen weights."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {name: value for name, value in by_itself(module, given, autocast).items() if name not in frozen}


@pytest.mark.parametrize("family", cases_of(["mixtral", "gpt_oss", "nemotron_h"]))
@pytest.mark.parametrize("case", ["dropless", "capacity", "full"])
def test_adapters_of_experts_are_peft_s(family: str, case: str) -> None:
    """Two products of their width give what PEFT gives by the sum of the weights."""
    module, given = adapted(module_of(family)), tokens_of(7, 3)
    sharing = ParallelContext(capacity_factor=NUM_EXPERTS / CHOICES) if case == "capacity" else None
    expected = by_peft(module, given)
    assert sum("lora_" in name for name in expected) == 4
    close(in_operators(module, given, sharing, "full" if case == "full" else "none"), expected)


@pytest.mark.parametrize("rank", [3, 8])
def test_adapters_of_experts_in_bf16(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as PEFT under autocast, also with torch's grouped GEMM, which takes no rows of 3 elements."""
    module = adapted(module_of("mixtral", intermediate_size=16, moe_intermediate_size=16), rank)
    given, precision = tokens_of(40, 3), Precision("cpu", torch.bfloat16)
    exact, stock = by_peft(module, given), by_peft(module, given, autocast=True)
    apart = in_operators(module, given, precision=precision)
    monkeypatch.setattr(grouped_linear, "_in_one_kernel", lambda rows: True)
    together = in_operators(module, given, precision=precision)
    for name, value in exact.items():
        for result in (apart, together):
            assert (result[name] - value).norm() <= 2 * (stock[name] - value).norm() + 2**-9 * value.norm(), name


def test_biases_alone_are_trained() -> None:
    module, given = module_of("gpt_oss"), tokens_of(7, 3)
    expected = by_itself(module, given)
    for name in ("gate_up_proj", "down_proj"):
        module.get_parameter(name).requires_grad_(False)
        del expected[name]
    close(in_operators(module, given), expected)


@SINCE["muse_spark"]
def test_a_norm_behind_experts_is_whole_on_every_rank() -> None:
    module = module_of("muse_spark")
    placed = unit_of_experts(module, ParallelContext()).placements
    assert placed[module.gate_up_proj].mesh_axis == placed[module.down_proj].mesh_axis == EXPERTS
    assert placed[module.post_expert_norm.weight].sums_gradient


def test_all_that_experts_have_is_cut_by_experts() -> None:
    module = module_of("gpt_oss")
    placed = unit_of_experts(module, ParallelContext()).placements
    assert {(p.dim, p.mesh_axis, p.length) for p in placed.values()} == {(CUT_EXPERTS.dim, EXPERTS, NUM_EXPERTS)}
    assert len(placed) == 4


def test_a_layer_may_have_two_modules_of_experts() -> None:
    b = Builder("layer", "layers.0", ParallelContext())
    x, weights = b.input("x"), b.input("weights")
    (chosen,) = b.autograd_outputs(
        "choose", lambda chosen: (chosen,), (), side=("chosen",), non_differentiable=("picked",)
    )
    for name in ("text", "image"):
        x = declare_experts(b, x, weights, chosen, module_of("mixtral"), name=name)
    given = tokens_of(7, 3)
    inputs = {name: given[name] for name in ("x", "weights")}
    outputs, _ = run_unit(b.build(x), inputs, side_of(given), {"image.out": given["gradient"]})
    once = by_itself(module_of("mixtral"), given)["out"]
    twice = by_itself(module_of("mixtral"), {**given, "x": once})["out"]
    torch.testing.assert_close(outputs["image.out"], twice)


def every_class() -> Iterator[tuple[str, str]]:
    """The families and names of all classes of experts that Transformers has its own implementations for."""
    for file in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)", file.read_text(), re.MULTILINE):
            yield file.parent.name, name


@pytest.mark.slow
def test_every_class_of_transformers_is_served() -> None:
    """Importing all of them takes long."""
    result = list(every_class())
    assert len(result) > 50
    for kind in result:
        module, given = experts_of(*kind), tokens_of(7, 3)
        assert is_experts(module), kind
        close(in_operators(module, given), by_itself(module, given))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("longcat_flash", "LongcatFlashExperts", "hold different numbers of experts .* some experts compute nothing"),
        (
            "llama4",
            "Llama4TextExperts",
            "its forward takes hidden_states, not tokens, chosen experts and",
        ),
        ("dbrx", "DbrxExperts", r"it has no gate_up_proj \(or up_proj\) and down_proj"),
    ],
)
def test_other_experts_are_refused_by_name(family: str, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"transformers\.models\.{family}\..*\.{name} cannot be spread.*{words}"):
        experts_form(experts_of(family, name))


class Scaled(nn.Module):
    """Has the weights of fused experts, and does something else with them."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE))
        self.act_fn = nn.SiLU()
        self.scale = scale

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = functional.embedding(index, self.gate_up_proj.flatten(1)).unflatten(-1, (-1, HIDDEN))
        rows = self._apply_gate((rows @ hidden[:, None, :, None]).squeeze(-1))
        rows = (self.down_proj[index] @ rows.unsqueeze(-1)).squeeze(-1)
        return (rows * weights.unsqueeze(-1)).sum(1) * self.scale


def test_code_that_does_something_else_is_refused() -> None:
    assert experts_form(Scaled(1.0)) == GATED
    with pytest.raises(ValueError, match="Scaled cannot be spread over ranks: its forward computes something else"):
        experts_form(Scaled(1.01))


def test_weights_that_no_form_has_are_refused() -> None:
    module = Scaled(1.0)
    module.gain = nn.Parameter(torch.ones(NUM_EXPERTS))
    with pytest.raises(ValueError, match="it has further parameters, gain"):
        experts_form(module)


def test_nothing_is_drawn_and_nothing_is_touched() -> None:
    """On the meta device, too, with a hundred experts that are wide."""
    module = module_of("gpt_oss", num_local_experts=100, intermediate_size=2048).to("meta")
    before, state = dict(module.named_parameters()), torch.get_rng_state()
    assert experts_form(module) == BIASED
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(module.named_parameters()) == before
    assert module.config._experts_implementation == "eager"
