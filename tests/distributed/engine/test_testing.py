"""`hf_helix.testing` and `hf-helix check` on processes of their own, and inside a process group that is there."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from support.mistaken_families import FailsOnARank, ForgetsASum
from support.models import made, tiny
from transformers import AutoConfig, LlamaConfig, MixtralConfig, OPTConfig, Qwen3Config

from hf_helix import HelixConfig
from hf_helix.cli import main
from hf_helix.engine.proof.prove import Subject
from hf_helix.engine.proof.verdict import BARS, ComparedWindow, Difference, Proof
from hf_helix.runtime.distributed import groups
from hf_helix.runtime.distributed.mesh import forget_meshes
from hf_helix.testing import check_family, prove_layouts

TP = ({"tp_size": 2},)
FAMILIES = "support.mistaken_families"


def test_a_process_of_its_own() -> None:
    (proof,) = check_family(tiny(num_hidden_layers=2), [{}])
    assert (proof.model, proof.layout, proof.verdict) == ("LlamaForCausalLM", "1 process", "equal")
    assert [case.kind for case in proof.cases] == ["rows", "padded left", "padded right", "packed", "all kinds"]
    assert not dist.is_initialized()


def test_what_differs_is_said() -> None:
    """The module that registers the family is found by itself."""
    with pytest.raises(AssertionError, match=r"ForgetsASum at tp_size=2: different") as caught:
        check_family(made(ForgetsASum, LlamaConfig, {"num_hidden_layers": 2}), TP)
    assert "input_layernorm.weight" in str(caught.value)


def test_a_rank_that_fails_ends_the_others() -> None:
    """They would wait for it; the layout after it is proven by new ones."""
    model = made(FailsOnARank, LlamaConfig, {"num_hidden_layers": 4})
    with pytest.raises(AssertionError, match="FailsOnARank at tp_size=2: failed: RuntimeError: the operator") as caught:
        check_family(model, [*TP, {"pp_size": 2}], imports=[FAMILIES])
    assert "in fail\n" in str(caught.value)
    assert "pp_size" not in str(caught.value)


def test_a_refusal_of_what_was_asked_for() -> None:
    with pytest.raises(AssertionError, match="refused: ep_size is given, and LlamaForCausalLM has no experts"):
        check_family(tiny(num_hidden_layers=2), [{"ep_size": 2}])


PATTERNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gemma3_text", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    (
        "opt",
        {"hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    ("bamba", {"attn_layer_indices": [9, 18, 27]}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], "output_router_logits": True}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("starcoder2", {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}),
)
"""Patterns of published models that the defaults of their classes leave off."""


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "changes"), PATTERNS)
def test_published_patterns(model_type: str, changes: dict[str, Any]) -> None:
    proofs = check_family(AutoConfig.for_model(model_type, **changes), [*TP, {"pp_size": 2}])
    assert not any(proof.uncovered for proof in proofs)


def test_parts_that_the_small_model_lacks_are_named() -> None:
    subject = Subject.of(OPTConfig(hidden_size=1024, num_attention_heads=16, word_embed_proj_dim=512))
    assert subject.uncovered(subject.build()) == ()
    equal = Subject.of(OPTConfig(hidden_size=1024, num_attention_heads=16, word_embed_proj_dim=1024)).build()
    assert subject.uncovered(equal) == ("model.decoder.project_in", "model.decoder.project_out")
    window = ComparedWindow("rows", "greedy", tuple(Difference.of(kind, 0.0) for kind in BARS))
    proof = Proof("OPTForCausalLM", "tp_size=2", (window,), uncovered=subject.uncovered(equal))
    assert "small model has none: model.decoder.project_in, model.decoder.project_out" in str(proof)


@pytest.mark.parametrize("tp_size", range(1, 9))
def test_small_models_divide_where_the_model_does(tp_size: int) -> None:
    """Also where its heads are 3, 5 or 7 times others."""
    given = Qwen3Config(num_attention_heads=4 * tp_size, num_key_value_heads=2 * tp_size, num_hidden_layers=2)
    config = Subject.of(given).build(HelixConfig(tp_size=tp_size)).config
    assert config.num_attention_heads % tp_size == config.num_key_value_heads % tp_size == 0
    assert config.num_attention_heads > config.num_key_value_heads


@pytest.mark.slow
def test_default_layouts() -> None:
    """A configuration is made small; a mixture has experts to share."""
    config = MixtralConfig(hidden_size=4096, num_hidden_layers=32)
    layouts = [proof.layout for proof in check_family(config)]
    assert layouts == ["tp_size=2", "pp_size=2", "tp_size=2, pp_size=2", "cp_size=2", "ep_size=2"]


@pytest.mark.slow
def test_a_mesh_that_cannot_be_made_is_one_failed_layout(cluster_of: Any) -> None:
    """Other layouts of the call are checked, over NCCL a pipeline among them."""
    for failed, other in cluster_of(2).run(check_on_nccl, layouts=[{"tp_size": 3}, {"pp_size": 2}]):
        assert failed[:2] == ("tp_size=3", "failed")
        assert failed[2].startswith("tp_size=3 must divide the world size, 2 processes")
        assert other[:2] == ("pp_size=2", "equal")


@pytest.mark.slow
def test_a_group_that_is_there(cluster_of: Any) -> None:
    """Its ranks and its device are used; of the default layouts, those that they fit."""
    ranks = cluster_of(2).run(check_here)
    assert ranks[0] == ranks[1]
    assert ranks[0] == (["tp_size=2", "pp_size=2", "cp_size=2"], "ForgetsASum at tp_size=2: different")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    LlamaConfig(hidden_size=4096).save_pretrained(tmp_path)
    main(["check", str(tmp_path), "--tp_size", "2"])
    said = capsys.readouterr()
    assert said.out.startswith("LlamaForCausalLM at tp_size=2: equal (loss ")
    assert said.err == "tp_size=2 ...\n"
    with pytest.raises(SystemExit) as caught:
        main(["check", "LlamaForCausalLM", "--ep_size", "2"])
    assert caught.value.code == 1
    assert "LlamaForCausalLM at ep_size=2: refused: ep_size is given, and" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_under_a_launcher() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "hf_helix", "check", "Qwen3ForCausalLM"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0].partition(" at ")[2] for line in done.stdout.splitlines() if " at " in line] == [
        "tp_size=2",
        "pp_size=2",
        "cp_size=2",
    ]


# In the processes of a cluster


def check_on_nccl(layouts: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """What is found of each layout where meshes are made as on NCCL."""
    forget_meshes()
    with patch.object(groups, "backend_of", lambda device: groups.NCCL):
        proofs = list(prove_layouts(Subject.of(tiny(num_hidden_layers=4)), layouts))
    forget_meshes()
    return [(proof.layout, proof.verdict, proof.failure) for proof in proofs]


def check_here() -> tuple[list[str], str]:
    """The default layouts of a model, and the beginning of the error of a mistaken one."""
    layouts = [proof.layout for proof in check_family(tiny(num_hidden_layers=4))]
    with pytest.raises(AssertionError) as caught:
        check_family(made(ForgetsASum, LlamaConfig, {"num_hidden_layers": 2}), TP)
    return layouts, str(caught.value).partition(" (")[0]
