"""What operators on the meta device are counted with equals what they are by hand, and what really runs."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.simulated import LLAMA, case_of, counted, on_meta

from hf_helix.config import HelixConfig
from hf_helix.doctor.amounts.records import ATTENTION, MATMUL, Amounts
from hf_helix.doctor.counting import CutRank, amounts_of, kinds_of
from hf_helix.doctor.memory import frozen_bytes
from hf_helix.engine.synthetic import adapted_on_meta
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.window.layout import named_operators

BATCH, LENGTH = 2, 32
TOKENS = BATCH * LENGTH
HIDDEN, MLP, VOCABULARY = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
HEADS, KV_HEADS, HEAD = 4, 2, 16
QKV = HEAD * (HEADS + 2 * KV_HEADS)


def flops(amounts: Amounts, unit: str, entry: str, sort: str = MATMUL) -> float:
    """Floating-point operations of an operator in kernels of a sort."""
    return sum(kernel.flops for kernel in amounts.operators[unit, entry].kernels if kernel.sort == sort)


def linear(rows: int, columns: int, depth: int) -> float:
    return 2.0 * rows * columns * depth


def linears(ranks: int) -> Mapping[tuple[str, str], float]:
    """Forward of every linear of a rank, of which `ranks` share the model or the tokens."""
    result = {
        ("layer", "attn.qkv"): linear(TOKENS, QKV, HIDDEN),
        ("layer", "attn.out"): linear(TOKENS, HIDDEN, HEAD * HEADS),
        ("layer", "mlp.up"): 2 * linear(TOKENS, MLP, HIDDEN),
        ("layer", "mlp.down"): linear(TOKENS, HIDDEN, MLP),
        ("head", "head"): linear(TOKENS, VOCABULARY, HIDDEN),
    }
    return {name: count / ranks for name, count in result.items()}


Count = Callable[..., Amounts]


@pytest.fixture(scope="module")
def count() -> Count:
    """`counted` of a small Llama, on a layout of these options; each layout once."""
    return functools.cache(functools.partial(counted, on_meta(), BATCH, LENGTH))


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 1),
        ({"tp_size": 2}, 2),
        ({"cp_size": 2}, 2),
        ({"tp_size": 2, "cp_size": 2, "bf16": True}, 4),
        ({"tp_size": 2, "recompute": "selective"}, 2),
        ({"tp_size": 2, "recompute": "full"}, 2),
    ],
    ids=str,
)
def test_linears_compute_what_their_shapes_say(options: dict[str, Any], ranks: int, count: Count):
    amounts = count(**options)
    for (unit, name), expected in linears(ranks).items():
        for entry in (f"F.{name}", f"B.{name}.I", f"B.{name}.W"):
            assert flops(amounts, unit, entry) == expected, entry
    total = sum(kernel.flops for each in amounts.operators.values() for kernel in each.kernels if kernel.sort == MATMUL)
    again = sum(flops(amounts, unit, name) for unit, name in amounts.operators if name.endswith(".again"))
    assert total == 3 * sum(linears(ranks).values()) + again
    # Whole layers are computed again up to what backward needs; selective recomputation keeps the products.
    whole_layer = sum(count for (unit, _), count in linears(ranks).items() if unit == "layer")
    assert 0 < again <= whole_layer if options.get("recompute") == "full" else again == 0


def test_attention_computes_half_of_the_products_under_a_causal_mask(count: Count):
    whole, tp, ring, again = (
        count(**each) for each in ({}, {"tp_size": 2}, {"cp_size": 2}, {"recompute": "selective"})
    )
    product = linear(LENGTH, LENGTH, HEAD) * BATCH * HEADS / 2
    for amounts, ranks in ((whole, 1), (tp, 2)):
        assert flops(amounts, "layer", "F.attention", ATTENTION) == 2 * product / ranks
        assert flops(amounts, "layer", "B.attention", ATTENTION) == 5 * product / ranks, "one of them again in backward"
    names = [name for unit, name in ring.operators if unit == "layer"]
    for letter, products in (("F", 2), ("B", 5)):
        counts = [flops(ring, "layer", name, ATTENTION) for name in names if name.startswith(letter)]
        assert sum(counts) == products * product / 2
        assert len([count for count in counts if count]) == 2, "a block of its own keys, and one of the other rank's"
    assert flops(again, "layer", "B.attention.again", ATTENTION) == 2 * product, "selective recomputation"


def test_half_precision_moves_half_the_bytes(count: Count):
    whole, half = count(tp_size=2), count(tp_size=2, bf16=True)

    def of(amounts: Amounts, entry: str) -> tuple[int, int]:
        result = amounts.operators["layer", entry]
        return sum(kernel.bytes for kernel in result.kernels), sum(each.bytes for each in result.transfers)

    assert of(whole, "F.mlp.gather")[1] == 2 * of(half, "F.mlp.gather")[1]
    products = [k.bytes for k in whole.operators["layer", "F.mlp.down"].kernels if k.sort == MATMUL]
    halves = [k.bytes for k in half.operators["layer", "F.mlp.down"].kernels if k.sort == MATMUL]
    assert products == [2 * each for each in halves]
    copied = half.copies["layer"] - whole.copies["layer"]  # beside what is made once for all positions
    assert copied == 2 * (half.weights["layer"].trained - 2 * HIDDEN), "of all weights but those of the two norms"


def test_every_operator_computes_or_sends_or_says_that_it_does_nothing(count: Count):
    for options in ({"tp_size": 2}, {"cp_size": 2, "recompute": "full"}):
        amounts = count(**options)
        kinds = {name: op.kind for name, op in named_operators(amounts.layout)}
        assert amounts.operators.keys() == kinds.keys()
        for name, result in amounts.operators.items():
            if kinds[name].communicates:
                assert not result.kernels, name
                assert result.transfers, name
            else:
                assert not result.transfers, name
                # The gradient of a sum is that of both its parts, and that of the loss needs nothing of other ranks.
                assert bool(result.kernels) != (name[1] in ("B.attn.add", "B.mlp.add", "B.loss.gather")), name
            assert result.peak >= max(0, result.delta), name
        assert sum(result.delta for result in amounts.operators.values()) == pytest.approx(0, abs=4096)


def test_shapes_say_what_is_sent_and_held(count: Count):
    amounts = count(tp_size=2)
    handed_on = TOKENS * HIDDEN * 4 // 2
    assert amounts.handed_on == handed_on
    for entry, method in (("F.attn.gather", "all_gather"), ("F.mlp.scatter", "reduce_scatter")):
        (sent,) = amounts.operators["layer", entry].transfers
        assert (sent.axis, sent.method, sent.bytes) == ("tp", method, handed_on), "half of the tokens, to one other"
    ring = count(cp_size=2)
    (sent,) = ring.operators["layer", "F.attention.ring1"].transfers
    assert (sent.axis, sent.method, sent.bytes) == ("cp", "shift", 2 * TOKENS // 2 * KV_HEADS * HEAD * 4)
    # Weights are those of a rank.
    layer = QKV * HIDDEN + HIDDEN * HEADS * HEAD + 3 * HIDDEN * MLP
    for tp in (1, 2):
        result = count(tp_size=tp).weights
        assert result["layer"].trained == layer // tp + 2 * HIDDEN
        assert result["embedding"].trained == VOCABULARY * HIDDEN // tp
        assert result["head"].trained == VOCABULARY * HIDDEN // tp + HIDDEN
        assert not any(each.frozen or each.experts for each in result.values())


def test_the_model_is_as_before():
    llama = on_meta()
    before = {name: (p, p.data_ptr(), p.shape, p.grad) for name, p in llama.named_parameters()}
    buffers = {name: (buffer, buffer.shape) for name, buffer in llama.named_buffers()}
    counted(llama, tp_size=2, recompute="full", bf16=True)
    with pytest.raises(ValueError, match="tp_size"):
        counted(llama, tp_size=3)
    assert {name: (p, p.data_ptr(), p.shape, p.grad) for name, p in llama.named_parameters()} == before
    assert {name: (buffer, buffer.shape) for name, buffer in llama.named_buffers()}.keys() == buffers.keys()
    assert all(p.grad is None and p.is_meta for p in llama.parameters())
    assert llama.training


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tp_size": 2, "recompute": "selective"},
        {"shard_parameters": True, "recompute": "full"},
        {"pp_size": 2, "spread_vocabulary": True},
        {"tp_size": 2, "float8": True},
        {"model_type": "mixtral", "ep_size": 2},
        {"model_type": "qwen3"},  # derived
    ],
)
def test_a_rank_that_was_cut_before_counts_other_micro_batches_as_a_new_one(options: dict[str, Any]):
    model = on_meta(options.get("model_type", "llama"))
    config = HelixConfig(**{name: value for name, value in options.items() if name != "model_type"})
    run: dict[str, Any] = {"autocast_dtype": torch.bfloat16, "dp_size": 4}
    kinds = replace(kinds_of(model), halved=())
    rank = CutRank(model, config, kinds, **run)
    for batch, length in ((1, 32), (4, 32), (2, 64), (1, 32)):
        found = rank.amounts(batch, length)
        amounts_of(model, HelixConfig(), 3, 16)  # another cut of the same model, between
        assert found == amounts_of(model, config, batch, length, kinds=kinds, **run)


def test_adapters_are_counted_and_frozen_weights_get_no_gradients():
    peft = pytest.importorskip("peft")
    base = on_meta()
    whole = counted(base, tp_size=2)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = peft.get_peft_model(base, config)
    result = counted(model, tp_size=2)
    assert result.weights["layer"].frozen == whole.weights["layer"].trained
    assert 0 < result.weights["layer"].trained < whole.weights["layer"].trained // 4
    assert result.weights["head"].trained == 0
    assert ("layer", "B.mlp.down.W") not in result.operators or not flops(result, "layer", "B.mlp.down.W")
    forward = [name for name in result.operators if name[0] == "layer" and name[1].startswith("F.")]
    more = sum(flops(result, *name) for name in forward)
    more -= sum(flops(whole, *name) for name in whole.operators if name in forward)
    # The second product of the adapters of queries and values is cut; the first is of the rank's tokens, or of all.
    second = linear(TOKENS, HEAD * (HEADS + KV_HEADS) // 2, 8)
    assert more - second in (linear(TOKENS, 8, HIDDEN), 2 * linear(TOKENS, 8, HIDDEN))


def test_frozen_weights_are_counted_in_the_type_they_were_loaded_in():
    pytest.importorskip("peft")
    model = adapted_on_meta(on_meta().config, 8, "all-linear", torch.bfloat16)
    held = counted(model, tp_size=2).weights["layer"]
    assert held.frozen_itemsize == 2
    assert frozen_bytes(held, case_of()) == 2 * held.frozen
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_frozen_experts_are_spread_over_those_that_have_copies():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = peft.get_peft_model(on_meta("phimoe", **EXPERTS), config)
    held = counted(model, ep_size=2).weights["layer"]
    assert (held.frozen_experts, held.experts) == (2 * 3 * HIDDEN * MLP, 0)
    whole, spread = case_of(dp=4, ep=2), case_of(dp=4, ep=2, shard_parameters=True)
    assert frozen_bytes(held, whole) == 4 * held.all_frozen
    assert frozen_bytes(held, spread) == 4 * (held.frozen / 4 + held.frozen_experts / 2)


def test_rows_of_experts_are_even():
    model = on_meta("phimoe", **EXPERTS)
    alone, shared = counted(model), counted(model, ep_size=2)
    layer = 3 * HIDDEN * MLP
    assert alone.weights["layer"].experts == 4 * layer
    assert shared.weights["layer"].experts == 2 * layer, "two of four experts"
    rows = TOKENS * EXPERTS["num_experts_per_tok"]
    for amounts in (alone, shared):
        counts = [flops(amounts, *name) for name in amounts.operators if name[1].startswith("F.") and "exp" in name[1]]
        assert sum(counts) == pytest.approx(3 * linear(rows, MLP, HIDDEN), rel=0.01), "as many rows arrive as leave"
    sent = {
        each.axis: each
        for name, result in shared.operators.items()
        for each in result.transfers
        if each.bytes > rows * HIDDEN  # not the counts
    }
    assert sent["experts"].bytes == rows * HIDDEN * 4 // 2, "half of the rows go to the other rank"


def test_experts_with_a_capacity_compute_as_many_rows_as_that():
    model = on_meta("phimoe", **EXPERTS)
    amounts = counted(model, BATCH, LENGTH, bf16=True, ep_size=2, dp_size=2, expert_capacity_factor=1.25)
    rows = 1.25 * EXPERTS["num_experts_per_tok"] * TOKENS
    for way, times in (("F.", 1), ("B.", 2)):  # an input gradient, and a weight gradient
        names = [name for name in amounts.operators if name[1].startswith(way) and "exp" in name[1]]
        assert sum(flops(amounts, *name) for name in names) == 3 * times * linear(int(rows), MLP, HIDDEN)
    sent = {each.bytes for result in amounts.operators.values() for each in result.transfers if each.axis == "experts"}
    assert sent == {int(rows) * HIDDEN}, "half of the rows leave in bf16, and no counts"


def test_derived_families_are_counted_too():
    result = counted(on_meta("phi3", pad_token_id=0), BATCH, LENGTH, tp_size=2)
    forward = sum(flops(result, *name) for name in result.operators if name[0] == "layer" and name[1].startswith("F."))
    assert forward == sum(count for (unit, _), count in linears(2).items() if unit == "layer")
    attention = [flops(result, *name, ATTENTION) for name in result.operators if name[1].startswith("F.")]
    assert sum(attention) == 2 * linear(LENGTH, LENGTH, HEAD) * BATCH * HEADS / 2 / 2
    assert {op.kind for _, op in named_operators(result.layout)} == {Kind.COMPUTE, Kind.INTRA_NODE}


SHARDED: dict[str, Any] = {"shard_parameters": True, "dp_size": 2}


@pytest.mark.parametrize("options", [{}, {"tp_size": 2}, {"bf16": True}, {"recompute": "full"}], ids=str)
def test_weights_that_are_spread_are_gathered_forward_and_again_in_backward(options: dict[str, Any], count: Count):
    """What products alone read in their type, norms and the table of embeddings in fp32; over more ranks each sends
    nearly all of it."""
    amounts = count(**options, **SHARDED)
    assert amounts.spread == {"copies": 2, "expert_copies": 2}
    gathers = {
        name: result.transfers
        for name, result in amounts.operators.items()
        if name[1].split(".")[1].startswith("weights")
    }
    norms = {"head": HIDDEN, "layer": 2 * HIDDEN}
    trained = {unit: result.trained for unit, result in amounts.weights.items()}
    expected = {("embedding", "F.weights"): 4 * trained["embedding"]}
    for unit, of_norms in norms.items():
        for way in ("F.{}", "B.{}.again") if unit == "layer" else ("F.{}",):
            if "bf16" in options:
                expected[unit, way.format("weights")] = 4 * of_norms
                expected[unit, way.format("weights.products")] = 2 * (trained[unit] - of_norms)
            else:
                expected[unit, way.format("weights")] = 4 * trained[unit]
    assert gathers.keys() == expected.keys()
    for ranks, counts in ((2, amounts), (8, count(**{**options, **SHARDED, "dp_size": 8}))):
        for name, whole in expected.items():
            (sent,) = counts.operators[name].transfers
            assert (sent.axis, sent.method) == ("copies", "all_gather")
            assert whole * (ranks - 1) / ranks <= sent.bytes <= whole + 4 * 64 * 32, "padding comes on top"


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"bf16": True, "recompute": "full"}], ids=str)
def test_spreading_weights_changes_nothing_else(options: dict[str, Any], count: Count):
    plain, spread = count(**options), count(**options, **SHARDED)
    assert spread.weights == plain.weights
    assert [row.adders for row in spread.parameters] == [row.adders for row in plain.parameters]
    for name, result in plain.operators.items():
        assert spread.operators[name].transfers == result.transfers, name
        assert sum(k.flops for k in spread.operators[name].kernels) == sum(k.flops for k in result.kernels), name
    assert sum(result.delta for result in spread.operators.values()) == pytest.approx(0, abs=4096)
    assert sum(result.weights for result in spread.operators.values()) == 0, "each piece is freed with its last reader"


FP8 = ("attn.qkv", "mlp.up", "attn.out", "mlp.down")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gathers_before_linears_in_fp8_carry_half_the_bytes(recipe: str, count: Count):
    """A byte for each feature and two for the scale of a token; other collectives stay as they are."""
    wide = {"hidden_size": 128}  # 2 ranks of which each has 16 features of keys
    options = ({}, {"float8": recipe})
    plain, scaled = (counted(on_meta(**wide), BATCH, LENGTH, bf16=True, tp_size=2, **each) for each in options)
    gathers = {("layer", "F.attn.gather"), ("layer", "F.mlp.gather")}
    for name, op in named_operators(plain.layout):
        before, now = ([sent.bytes for sent in each.operators[name].transfers] for each in (plain, scaled))
        if name in gathers:
            assert (before, now) == ([TOKENS // 2 * 2 * 128], [TOKENS // 2 * (128 + 2)])
        else:
            assert now == before, name
        products = [kernel for kernel in scaled.operators[name].kernels if kernel.sort == MATMUL]
        in_fp8 = name[0] == "layer" and op.forward_name in FP8 and not name[1].endswith(".W")
        assert all(kernel.fp8 is in_fp8 for kernel in products), name
        assert flops(scaled, *name) == flops(plain, *name), name
    scales = 4 * (8 if recipe == "tensorwise" else 4 * 128 + 4 * 128 + 2 * 64 + 2 * HEAD * HEADS)
    more = scaled.copies["layer"] - plain.copies["layer"]  # a byte forward and a byte backward, for two of bf16
    assert 0 < more <= scales
