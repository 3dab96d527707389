"""Recurrent mixers: where the trace stops, how they are cut, what runs, and what is refused."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import derived_models
from support.derived_models import HYBRIDS, small
from support.marks import slow
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.nemotron_h import modeling_nemotron_h

from hf_helix.config import HelixConfig
from hf_helix.engine.cut.microbatches import LossScale, WindowMaker
from hf_helix.models.graph.context import ATTENTION, ParallelContext
from hf_helix.models.registry import family_of
from hf_helix.models.stock.batch_inputs import SequenceCut
from hf_helix.models.trace.mixers import hide_padding, shares_of
from hf_helix.operators.communication.collectives import AllGather, Exchange
from hf_helix.operators.communication.transport import Axis, SilentTransport
from hf_helix.operators.units.unit import Unit
from hf_helix.planning.parameters import COPIED_SUMMED, Cut
from hf_helix.runtime.distributed.mesh import mesh_of


@functools.cache
def model_of(name: str) -> Any:
    return getattr(derived_models, name)()


def units_of(name: str, tp_size: int = 2) -> list[Unit]:
    """The units of the layers for the first of some ranks."""
    model = model_of(name)
    return family_of(model).units(model, ParallelContext(Axis(SilentTransport(tp_size, 0))))[1:-1]


def cuts(name: str) -> dict[str, Cut]:
    """The cuts of all vectors and convolutions of the first layer."""
    placements, layer = units_of(name)[0].placements, next(iter(family_of(model_of(name)).layers(model_of(name))))
    return {path: placements[p] for path, p in layer.named_parameters() if p.dim() != 2 and "experts" not in path}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_5", {"conv1d.weight": (0, (32, 32, 64)), "dt_bias": (0, ()), "A_log": (0, ())}),
        ("lfm2", {"conv.weight": (0, ())}),
    ],
)
def test_parameters_are_cut_with_heads_and_channels(name: str, expected: dict[str, Any]) -> None:
    found = {path: (how.dim, how.blocks) for path, how in cuts(name).items() if how.dim is not None}
    assert len(found) == len(expected)
    for path, how in found.items():
        assert how == next(wanted for end, wanted in expected.items() if path.endswith(end)), path


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_no_mixer_runs_in_full(name: str) -> None:
    assert all(how.dim is not None for path, how in cuts(name).items() if "conv" in path)


def test_mixers_are_operators_with_the_cost_of_attention() -> None:
    operators = {op.name: op for op in units_of("qwen3_5")[0].graphs.forward.operators}
    scan, convolution = (
        operators[f"linear_attn.{name}"] for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    )
    assert scan.relative_cost == ATTENTION > convolution.relative_cost
    assert scan.recompute_when_selective
    assert convolution.recompute_when_selective


def test_the_function_of_the_file_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are installed, or put there later, are called as the model itself would call them."""
    model = model_of("lfm2")
    unit = family_of(model).units(model, ParallelContext())[1]
    operator: Any = unit.operators["conv.causal_conv1d_fn"]
    value = torch.randn(5, 2, 192)
    before = operator.function(value, length=5)
    plain = modeling_lfm2.causal_conv1d_fn
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", lambda *args, **kwargs: 2 * plain(*args, **kwargs))
    torch.testing.assert_close(operator.function(value, length=5), 2 * before)


def test_padding_is_hidden_where_there_is_any() -> None:
    value, seen = torch.ones(4, 2, 3), torch.ones(8, 2)
    seen[5, 1] = 0
    assert hide_padding(value, None) is value
    assert hide_padding(value, seen, rank=0).eq(1).all()
    hidden = hide_padding(value, seen, rank=1)
    assert hidden[1, 1].eq(0).all()
    assert hidden.sum() == 21


@pytest.mark.parametrize("masked", [True, False])
def test_the_mask_of_padding_is_a_side_input(masked: bool) -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0 if masked else 1
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    (made,) = WindowMaker(model_of("lfm2"), mesh_of(HelixConfig(), "cpu")).window([batch], LossScale(torch.ones(())), 0)
    seen = made.prepare()["seen"]
    assert torch.equal(seen, mask.t()) if masked else seen is None


def test_documents_of_kernels_are_refused() -> None:
    ids = torch.ones(1, 5, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "seq_idx": torch.zeros_like(ids)}
    with pytest.raises(ValueError, match=r"the batch has seq_idx, by which .* position_ids alone"):
        WindowMaker(model_of("lfm2"), mesh_of(HelixConfig(), "cpu")).window([batch], LossScale(torch.ones(())), 0)


def test_towers_are_copied_and_sound_is_refused() -> None:
    model = small("LlavaForConditionalGeneration")
    unit = family_of(model).units(model, ParallelContext(Axis(SilentTransport(2, 0))))[0]
    towers = [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]
    assert {unit.placements[p] for p in towers} == {COPIED_SUMMED}
    assert all(p.requires_grad for p in towers)
    ids = torch.ones(1, 5, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "input_features": torch.ones(1, 4, 4)}
    with pytest.raises(ValueError, match="the batch has input_features, for a tower of videos or sound"):
        WindowMaker(model, mesh_of(HelixConfig(), "cpu")).window([batch], LossScale(torch.ones(())), 0)


def test_ids_are_looked_up_as_the_model_changes_them() -> None:
    """Padding stands in the places of images."""
    model = small("Gemma4ForConditionalGeneration")
    unit = family_of(model).units(model, ParallelContext())[0]
    (lookup,) = (
        each for name, each in unit.operators.items() if "embed_tokens" in name and "ids" in getattr(each, "side", ())
    )
    ids = torch.tensor([[5], [model.config.image_token_id]])
    expected = model.get_input_embeddings().weight[[5, model.config.text_config.pad_token_id]]
    assert torch.equal(lookup.function(ids=ids)[:, 0], expected)


def shared(name: str, cp_size: int, rank: int = 1, **ways: Any) -> list[Unit]:
    """The units of the layers over a sequence that ranks share, for one of them."""
    model = model_of(name)
    return family_of(model).units(model, ParallelContext(cp=Axis(SilentTransport(cp_size, rank)), **ways))[1:-1]


def compared(name: str, operator: str, run: Any, cp_size: int, sizes: Sequence[int], length: int, **ways: Any) -> None:
    """Compares a mixer over a sequence that ranks share, and its input gradients, with the mixer over the sequence."""
    model, cut = model_of(name), functools.partial(SequenceCut, 1, cp_size)
    whole: Any = family_of(model).units(model, ParallelContext())[1].operators[operator]
    ranks: list[Any] = [shared(name, cp_size, rank, **ways)[0].operators for rank in range(cp_size)]
    values = [torch.randn(cut().padded(length), 2, size, requires_grad=True) for size in sizes]
    expected = whole.function(*(value[:length] for value in values), length=length)
    parts = [[cut(rank).take(value, 0) for value in values] for rank in range(cp_size)]
    found = cut().join(torch.cat(run(ranks, parts)))[:length]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((result * weights).sum(), values) for result in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("length", [5, 21, 24])  # parts shorter than the halo, padding behind the rows, none
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_convolutions_over_a_shared_sequence_take_the_tokens_before_each_part(cp_size: int, length: int) -> None:
    name = "conv.causal_conv1d_fn"

    def run(ranks: Sequence[Any], parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        ends = [each[f"{name}.ends"].function(*values) for each, values in zip(ranks, parts, strict=True)]
        assert len(ends[0]) == 2 * min(model_of("lfm2").config.conv_L_cache - 1, len(parts[0][0]) // 2)
        assert isinstance(ranks[0][f"{name}.halo"], AllGather)
        return [each[name].function(*values, torch.cat(ends)) for each, values in zip(ranks, parts, strict=True)]

    compared("lfm2", name, run, cp_size, (192,), length)


@pytest.mark.parametrize(
    ("model", "name", "sizes", "cp_size", "length"),
    [
        ("qwen3_5", "linear_attn.torch_chunk_gated_delta_rule", (128, 4, 4), 2, 134),
        ("qwen3_5", "linear_attn.torch_chunk_gated_delta_rule", (128, 4, 4), 3, 5),
        slow("kimi_linear", "self_attn.chunk_kimi_delta_attention", (192, 64, 4), 2, 134),
    ],
)
def test_states_are_handed_over_the_parts_of_a_shared_sequence(
    model: str, name: str, sizes: Sequence[int], cp_size: int, length: int
) -> None:
    def run(ranks: Sequence[Any], parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        results = [each[name].function(*values) for each, values in zip(ranks, parts, strict=True)]
        assert isinstance(ranks[0][f"{name}.states"], AllGather)
        states = torch.cat([last for _, last in results])
        return [each[f"{name}.carried"].function(wide, states) for each, (wide, _) in zip(ranks, results, strict=True)]

    compared(model, name, run, cp_size, sizes, length, cp_recurrence="states")


def test_states_that_are_not_handed_on_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"cp_recurrence='states': mamba2_chunk_scan\(\) .* use cp_recurrence='heads'"):
        shared("nemotron_h", cp_size=2, cp_recurrence="states")


def test_ranks_of_a_shared_sequence_mix_shares_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sees the whole sequence in its order and without padding, over the heads of this rank."""
    operators: Any = shared("nemotron_h", cp_size=2)[0].operators
    exchange, mix = (operators[f"mixer.mamba2_chunk_scan{end}"] for end in (".exchange", ""))
    assert isinstance(exchange, Exchange)
    tokens, seen = 12, []
    plain = modeling_nemotron_h.mamba2_chunk_scan

    def watch(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((hidden_states, kwargs["dt_bias"]))
        return plain(hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_nemotron_h, "mamba2_chunk_scan", watch)
    order = torch.tensor([0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8])  # zig-zag: rank 0 has parts 0 and 3 of 4
    sizes = ((4, 16), (4,), (4, 16), (4, 16))  # heads, steps of time, two kinds of state features
    values = [order.view(-1, *[1] * (len(size) + 1)).expand(-1, 1, *size).float() for size in sizes]
    mixed = mix.function(*values, length=tokens - 1)
    ((hidden, steps),) = seen
    assert torch.equal(hidden[0, :, 0, 0], torch.arange(tokens - 1.0))
    assert torch.equal(steps, model_of("nemotron_h").model.layers[0].mixer.dt_bias[4:])
    assert mixed[order == tokens - 1].eq(0).all()


def test_shares_of_heads_groups_and_common_values() -> None:
    heads, group, common = torch.arange(4.0).view(1, 1, 4), torch.ones(1, 1, 1), torch.ones(1, 1, 3)
    assert [share.flatten().tolist() for share in shares_of(heads, 2, 2)] == [[0, 1], [2, 3]]
    assert [share.flatten().tolist() for share in shares_of(heads[..., :2], 2, 4)] == [[0], [0], [1], [1]]
    assert [share.shape for share in shares_of(group, 2, 2)] == [(1, 1, 1)] * 2
    assert all(share is common for share in shares_of(common, None, 2))


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"cp_size=3: mamba2_chunk_scan\(\) has 8 heads.*use a cp_size that divides 8"):
        shared("nemotron_h", cp_size=3)
