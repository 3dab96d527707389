"""Predictions beside figures that were measured or published: docs/doctor.md says how far apart they are."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from hf_helix.doctor.case import Case
from hf_helix.doctor.rivals import FSDP, simulate_rival
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import simulate_step
from hf_helix.operators.fused import kernels
from hf_helix.planning.timing.cluster import load_cluster
from hf_helix.planning.timing.sizes import Sizes

NODE = load_cluster("h100x8")


@pytest.mark.slow
def test_a_llama_of_1_billion_parameters_on_one_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.2554 s on 2026-11-22 (benchmarks/results/2026-11-22-gpu-h100.md), without kernels of Triton."""
    monkeypatch.setattr(kernels, "is_on", lambda value: False)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=16, vocab_size=32000, tie_word_embeddings=False, **sizes)
    one = replace(NODE, devices_per_node=1)
    case = Case(Sizes(), 2, 4096, 8, plan="sequential")
    step = simulate_step(SimulatedModel(config, one).amounts(case), case, one)
    assert step.seconds == pytest.approx(1.2554, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("fused", "compiled", "eager"), [(False, 1.24, 1.43), (True, 1.54, 1.78)])
def test_a_llama_of_8_billion_parameters_with_fsdp_of_torchtitan(
    fused: bool, compiled: float, eager: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,762 tokens/s a GPU, 6,667 compiled (benchmarks/llama3_h100_202412_torchtitan.md of torchtitan, table 1)."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if not fused:
        monkeypatch.setattr(kernels, "is_on", lambda value: False)
    config = LlamaConfig(num_hidden_layers=32, vocab_size=128256, tie_word_embeddings=False, **sizes)
    case = Case(Sizes(dp=8), 2, 8192, 1, plan="sequential", recompute="selective")
    step = simulate_rival(FSDP, SimulatedModel(config, NODE).amounts(case), case, NODE).step
    rate = step.tokens_per_second / 8
    assert rate / 6667 == pytest.approx(compiled, abs=0.03)
    assert rate / 5762 == pytest.approx(eager, abs=0.03)
