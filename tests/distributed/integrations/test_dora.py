"""DoRA on several ranks against the unsplit PEFT model and the stock Trainer; saved as PEFT saves; refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invariant.harness import check_adapted
from peft import LoraConfig, PeftModel, get_peft_model
from support import jobs
from support.comparisons import assert_same_bits, compare_adapters, compare_runs
from support.derived_models import HOME
from support.marks import slow
from support.models import arguments, llama, tiny

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.planning.graph.operator import Kind

# -- what the ranks run ------------------------------------------------------------------------------------------------


def resumed(folder: str, helix: dict[str, Any], **options: Any) -> dict[str, Any]:
    """As `jobs.train`, from the checkpoint of step 2."""
    trainer: Any = jobs.make_trainer(folder, helix, **options)
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": [entry["loss"] for entry in logs], "norms": [float(entry["grad_norm"]) for entry in logs]}


def exchanges(folder: str, model: dict[str, Any]) -> list[str]:
    """The communication of a layer's forward pass that plain LoRA has not."""
    found = []
    for dora in (True, False):
        made = tiny(**{**model, "lora": {**model["lora"], "use_dora": dora}})
        trainer = HelixTrainer(model=made, args=arguments(folder), helix_config=HelixConfig(tp_size=2, plan="greedy"))
        graph = trainer.helix.runner.rank_units.layout.graphs["layer"].forward
        found.append([op.name for op in graph.operators if op.kind is not Kind.COMPUTE])
    return [name for name in found[0] if name not in found[1]]


# -- the tests --------------------------------------------------------------------------------------------------------

GREEDY = {"plan": "greedy"}
TP, PP, CP = {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = {"target_modules": ["q_proj", "o_proj", "down_proj"], "use_dora": True}
OF_GPT2 = ["c_attn", "c_proj", "c_fc", "wte"]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"lora": {"target_modules": [*LINEARS, "lm_head"], "use_dora": True, "use_rslora": True}},
    "biases": {"lora": {"target_modules": LINEARS, "use_dora": True, "bias": "all"}, "attention_bias": True},
    "table": {"lora": {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True, "idle": "other"}},
    "gpt2": {"family": "gpt2", "lora": {"target_modules": OF_GPT2, "use_dora": True, "fan_in_fan_out": True}},
    "kept": {"family": "qwen3", "lora": {**SOME, "modules_to_save": ["embed_tokens", "lm_head", "norm"]}},
    "mixtral": {"family": "mixtral", "lora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True}},
    **{
        name: {"family": f"{HOME}{name}", "lora": {"target_modules": targets, "use_dora": True}}
        for name, targets in {
            "gemma3": LINEARS,
            "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
            "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "qwen3_5": ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "v_proj"],
        }.items()
    },
}

CASES = [
    ("biases", "tp2"),
    slow("llama", "tp2"),
    slow("table", "tp2"),
    slow("gpt2", "tp2"),
    slow("kept", "tp2+pp2"),
    slow("llama", "tp2+cp2"),
    slow("table", "pp2"),
    slow("mixtral", "dp2+ep2"),
    slow("mixtral", "tp2"),
    slow("gemma3", "tp2"),
    slow("phi3", "tp2+pp2"),
    slow("deepseek_v3", "tp2"),
    slow("qwen3_5", "tp2"),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_equal_the_unsplit_models(name: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    """Losses, the gradient of every trained weight by name, and the same bits under every plan."""
    check_adapted(cluster_of, tmp_path, name, MODELS[name], layout)


def test_plans_and_recomputation_give_the_same_bits(cluster_of: Any, tmp_path: Path) -> None:
    """Also with dropout."""
    model = {"num_hidden_layers": 2, "lora": {**SOME, "lora_dropout": 0.3}}
    given = {"folder": str(tmp_path), "model": model}
    plans = [(plan, "folded_1f1b", 2) for plan in ("greedy", "dhelix")]
    job = "support.pipeline_jobs:windows"
    first, other = cluster_of(2).run(job, helix=TP, cases=plans, **given)[0]
    assert_same_bits(other, first)
    for mode in ("selective", "full"):
        (other,) = cluster_of(2).run(job, helix={**TP, "recompute": mode}, cases=plans[:1], **given)[0]
        assert_same_bits(other, first)


def test_only_linears_cut_by_input_features_exchange_norms(cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "model": {"num_hidden_layers": 2, "lora": {"target_modules": LINEARS}}}
    assert cluster_of(2).run(exchanges, **job) == [["attn.out.norms.gather", "mlp.down.norms.gather"]] * 2


# -- the Trainer, files --------------------------------------------------------------------------------------------

TRAINED: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": LINEARS, "use_dora": True, "init_lora_weights": True},
    "llama, kept": {**SOME, "modules_to_save": ["lm_head", "norm"], "idle": "other"},
    "llama, pissa": {**SOME, "init_lora_weights": "pissa"},
    "gpt2": {"target_modules": OF_GPT2[:-1], "use_dora": True, "fan_in_fan_out": True},
    "mixtral": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
}
"""By family, the adapters."""


@pytest.mark.parametrize(
    ("case", "helix"),
    [
        ("llama", {"shard_parameters": True}),
        slow("llama", TP),
        slow("llama, kept", PP),
        slow("llama, pissa", TP),
        slow("llama", CP),
        slow("gpt2", {"shard_optimizer": True}),
        slow("gpt2", {**TP, "shard_parameters": True}),
        slow("mixtral", {"ep_size": 2, "shard_optimizer": True}),
        slow("mixtral", {"ep_size": 2, "shard_parameters": True, "recompute": "full"}),
        slow("llama", {**TP, **PP}),
        slow("llama", {**PP, "shard_parameters": True, "recompute": "selective"}),
    ],
    ids=str,
)
def test_training_equals_the_stock_trainer(
    case: str, helix: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """Losses, norms, evaluation; and the files of the adapters, which stock PEFT loads, runs and merges."""
    model = {"family": case.partition(",")[0], "num_hidden_layers": 5}
    training = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    job = {"model": {**model, "lora": TRAINED[case]}, "training": training}
    dp = 2 if any(name.startswith("shard") for name in helix) else 1
    expected, theirs = stock(jobs.train, dp, **job)
    ranks = dp * 2 ** len(helix.keys() & {*TP, *PP, *CP})
    for result in cluster_of(ranks).run("train", folder=str(tmp_path), helix={**helix, **GREEDY}, **job):
        compare_runs(result, expected, steps=4)
    compare_adapters(tmp_path, Path(theirs))
    loaded = PeftModel.from_pretrained(tiny(**model), tmp_path).eval()
    logits = logits_of(loaded)
    assert not torch.equal(logits, logits_of(tiny(**model).eval()))
    torch.testing.assert_close(logits, logits_of(PeftModel.from_pretrained(tiny(**model), theirs).eval()))
    torch.testing.assert_close(logits_of(loaded.merge_and_unload()), logits, rtol=1e-4, atol=1e-5)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 18).unsqueeze(0)).logits


@pytest.mark.slow
@pytest.mark.parametrize("helix", [PP, CP, {**TP, "recompute": "full"}], ids=str)
def test_a_run_goes_on_with_another_layout(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    job = {"folder": str(tmp_path), "model": {"num_hidden_layers": 4, "lora": SOME}, "training": steps}
    expected = cluster_of(2).run("train", helix={**TP, **GREEDY}, **job)[0]
    for result in cluster_of(2).run(resumed, helix={**helix, **GREEDY}, **job):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_adapters_that_would_be_scaled_by_another(tmp_path: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "plain"])
    with pytest.raises(ValueError, match=r"'default', 'plain' are active together.*model.set_adapter\('default'\)"):
        HelixTrainer(model=model, args=arguments(str(tmp_path)), helix_config=HelixConfig(plan="greedy"))


def test_peft_itself_refuses_dora_on_parameters() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"], use_dora=True)
    with pytest.raises(ValueError, match="ParamWrapper does not work with use_dora=True"):
        get_peft_model(tiny("mixtral"), config)
