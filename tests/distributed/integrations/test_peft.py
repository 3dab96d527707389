"""PEFT: LoRA on several ranks against the unsplit PEFT model and the stock Trainer; saved as PEFT saves; refusals."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from invariant.harness import check_adapted
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    initialize_lora_eva_weights,
)
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora.config import CordaConfig
from safetensors.torch import load_file
from support import jobs, pipeline_jobs
from support.comparisons import assert_same_bits, compare_adapters, compare_runs
from support.derived_models import HOME
from support.marks import slow
from support.models import adapted, arguments, llama, sequences, tiny
from torch import nn
from transformers import TrainerCallback

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.planning.graph.operator import Part
from hf_helix.runtime.divided import plain_parameters

# -- what the ranks run ------------------------------------------------------------------------------------------------


@plain_parameters()
def parts(folder: str, model: dict[str, Any]) -> dict[str, Any]:
    """The weight gradients in the graphs, and the bytes of gradients that a window leaves."""
    made = tiny(**model)
    trainer = HelixTrainer(model=made, args=arguments(folder), helix_config=HelixConfig(cache=False))
    made.train()
    trainer.helix.runner.train_window(pipeline_jobs.window_of(trainer, 2, 2, (9,)))
    rank_units = trainer.helix.runner.rank_units
    return {
        "weights": {
            unit.label: [op.forward_name for op in unit.graphs.backward.operators if op.part is Part.W]
            for unit in rank_units.units.values()
        },
        "names": {unit.label: unit.name for unit in rank_units.units.values()},
        "gradients": sum(p.grad.nbytes for p in rank_units.own_rows if p.grad is not None),
        "trained": sum(p.nbytes for p in rank_units.own_rows if p.requires_grad),
        "held": sum(p.nbytes for p in rank_units.own_rows),
    }


def load_into(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> None:
    """Load saved adapters into a cut model."""
    HelixTrainer(model=tiny(**model), args=arguments(folder), helix_config=HelixConfig(**helix)).helix.load_weights(
        folder
    )


def evaluations(folder: str, helix: dict[str, Any] | None, model: dict[str, Any], **training: Any) -> dict[str, float]:
    """Losses with the adapters that are trained, without adapters, with the idle one if there is one, and as first."""
    trainer: Any = jobs.build(folder, helix, training, model=tiny(**model), eval_dataset=sequences(4))
    result = {"trained": trainer.evaluate()["eval_loss"]}
    with trainer.model.disable_adapter():
        result["none"] = trainer.evaluate()["eval_loss"]
    if idle := model["lora"].get("idle"):
        trainer.model.set_adapter(idle)
        result["idle"] = trainer.evaluate()["eval_loss"]
        trainer.model.set_adapter("default")
    return result | {"again": trainer.evaluate()["eval_loss"]}


def train_the_idle_one(folder: str, helix: dict[str, Any], model: dict[str, Any], **training: Any) -> list[float]:
    """Losses of a run that trains the adapter which was idle when the model was cut; of an evaluation behind it."""
    data = {"train_dataset": sequences(20), "eval_dataset": sequences(4)}
    trainer: Any = jobs.build(folder, helix, {"max_steps": 3, **training}, model=tiny(**model), **data)
    trainer.model.set_adapter(model["lora"]["idle"])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


def train_by_lora_plus(folder: str, helix: dict[str, Any] | None, model: dict[str, Any], **options: Any) -> Any:
    """As `jobs.train`, with a rate for `lora_B` four times as high."""
    made = tiny(**model)
    optimizer = create_loraplus_optimizer(made, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=4)
    with mock.patch("support.jobs.tiny", return_value=made):
        return jobs.train(folder, helix, optimizers=(optimizer, None), **options)


def train_initialised(folder: str, helix: dict[str, Any] | None, kind: str, **options: Any) -> Any:
    """As `jobs.train`, with adapters that PEFT makes of the model's weights, or of its values on some tokens."""
    made, ids = tiny(num_hidden_layers=4), torch.arange(3, 75).view(2, 36)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=kind)
    if kind == "corda":
        from peft.tuners.lora.corda import preprocess_corda  # needs attrs

        config.corda_config = CordaConfig()
        preprocess_corda(made, config, lambda: [made(row.unsqueeze(0)) for row in ids])
    made = get_peft_model(made, config)
    if kind == "eva":
        batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
        initialize_lora_eva_weights(made, batches, gather_distributed_inputs=False, show_progress_bar=False)
    with mock.patch("support.jobs.tiny", return_value=made):
        return jobs.train(folder, helix, **options)


# -- the tests --------------------------------------------------------------------------------------------------------

GREEDY = {"plan": "greedy"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYWHERE = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]
DOWN = "down_proj.weight"
FUSED = ["experts.gate_up_proj", "experts.down_proj"]
ROUTED = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "modules_to_save": ["gate"]}
OF_GPT2 = ["c_attn", "c_proj", "c_fc"]

MODELS: dict[str, dict[str, Any]] = {
    "every linear": {"lora": {"target_modules": EVERYWHERE, "use_rslora": True, "idle": "other"}},
    "some, with other ranks": {
        "lora": {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"v_proj": 5}},
        "attention_bias": True,
    },
    "linears by their weights": {"lora": {"target_modules": ["q_proj"], "target_parameters": ["k_proj.weight", DOWN]}},
    "some layers": {"lora": {"layers_to_transform": [1], "target_modules": ATTENTION}},
    "kept": {"family": "qwen3", "lora": {"modules_to_save": ["embed_tokens", "lm_head", "norm", "q_norm"]}},
    "gpt2, biases": {
        "family": "gpt2",
        "lora": {"target_modules": OF_GPT2, "bias": "all", "lora_bias": True, "fan_in_fan_out": True},
    },
    "gpt2, tables": {
        "family": "gpt2",
        "lora": {"target_modules": ["wte", "wpe", "c_attn"], "bias": "lora_only", "fan_in_fan_out": True},
    },
    "experts": {"family": "mixtral", "lora": {"idle": "other"}},
    "balanced": {"family": "qwen3_moe", "output_router_logits": True, "router_aux_loss_coef": 0.5, "lora": ROUTED},
    "balanced, routers": {"family": "mixtral", "output_router_logits": True, "router_aux_loss_coef": 0.5, "lora": {}},
    "phimoe": {
        "family": "phimoe",
        "lora": {"target_modules": ["q_proj"], "target_parameters": [*FUSED, "router.weight"]},
    },
    "qwen2_moe": {
        "family": f"{HOME}qwen2_moe",
        "lora": {"target_modules": ["up_proj"], "target_parameters": [*FUSED, "mlp.gate.weight"]},
    },
    "gpt_oss": {
        "family": f"{HOME}gpt_oss",
        "lora": {"target_modules": ["q_proj"], "target_parameters": [*FUSED, "router.weight"]},
    },
    **{name: {"family": f"{HOME}{name}", "lora": {}} for name in ("glm4_moe", "deepseek_v3", "olmoe")},
    "tied": {"lora": {"target_modules": ["q_proj", "lm_head"]}, "tie_word_embeddings": True},
}

CASES = [
    *((name, "tp2") for name in ("every linear", "gpt2, biases", "gpt2, tables")),
    ("some, with other ranks", "cp2"),
    slow("gpt2, biases", "tp2+pp2"),
    slow("kept", "tp2+pp2"),
    slow("tied", "pp2"),
    slow("linears by their weights", "tp2"),
    slow("some layers", "pp2"),
    slow("every linear", "dp2"),
    slow("experts", "dp2+ep2"),
    slow("experts", "tp2"),
    slow("experts", "tp2+pp2"),
    slow("experts", "cp2"),
    slow("balanced", "dp2+ep2"),
    slow("balanced, routers", "tp2"),
    slow("phimoe", "dp2+ep2"),
    slow("qwen2_moe", "tp2"),
    slow("gpt_oss", "dp2+ep2"),
    slow("glm4_moe", "tp2"),
    slow("deepseek_v3", "dp2+ep2"),
    slow("olmoe", "pp2"),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_equal_the_unsplit_models(name: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    """Losses, the gradient of every trained weight by name, and the same bits under every plan."""
    check_adapted(cluster_of, tmp_path, name, MODELS[name], layout)


def test_dropout_is_the_same_under_every_plan(cluster_of: Any, tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "lora": {"lora_dropout": 0.3, "target_modules": ["q_proj", "o_proj"]}}
    case = {"folder": str(tmp_path), "model": model, "helix": {"tp_size": 2, "plan": "sequential"}}
    plans = [(plan, "folded_1f1b", 2) for plan in ("sequential", "greedy", "dhelix")]
    first, *others = cluster_of(2).run("support.pipeline_jobs:windows", cases=plans, **case)[0]
    model["lora"]["lora_dropout"] = 0.0
    (without,) = cluster_of(2).run("support.pipeline_jobs:windows", cases=plans[:1], **case)[0]
    assert first["losses"] != without["losses"]
    for other in others:
        assert_same_bits(other, first)


def test_recomputation_gives_the_same_bits(cluster_of: Any, tmp_path: Path) -> None:
    """Also where a linear with dropout in front of its adapter runs again."""
    lora = {"lora_dropout": 0.3, "target_modules": ["q_proj", "up_proj", "down_proj"], "layers_to_transform": [0]}
    case = {
        "folder": str(tmp_path),
        "model": {"num_hidden_layers": 2, "lora": lora},
        "cases": [("greedy", "folded_1f1b", 2)],
    }
    kept, *others = (
        cluster_of(2).run("support.pipeline_jobs:windows", helix={"tp_size": 2, "recompute": mode}, **case)[0][0]
        for mode in ("none", "selective", "full")
    )
    for other in others:
        assert_same_bits(other, kept)


# -- what is frozen ------------------------------------------------------------------------------------------------


def test_frozen_weights_have_no_weight_gradients(tmp_path: Path) -> None:
    model = {"num_hidden_layers": 3, "lora": {"target_modules": ["v_proj"], "layers_to_transform": [0, 2]}}
    result = parts(str(tmp_path), model)
    labels = ("layers.0", "layers.1", "layers.2")
    assert [result["weights"][label] for label in labels] == [["attn.qkv"], [], ["attn.qkv"]]
    assert [result["names"][label] for label in labels] == ["layer", "layer.2", "layer"]
    assert result["weights"]["head"] == []
    assert result["gradients"] == result["trained"] < 0.02 * result["held"]

    without = parts(str(tmp_path), {"num_hidden_layers": 3})
    assert without["weights"]["layers.1"] == ["mlp.down", "mlp.up", "attn.out", "attn.qkv"]
    assert set(without["names"].values()) == {"embedding", "layer", "head"}
    assert without["gradients"] == without["held"]


class Unfreeze(TrainerCallback):
    """Frees a weight behind the first step."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.weight.requires_grad_(True)


@pytest.mark.parametrize("step", [0, 1])
def test_weights_that_are_unfrozen_too_late(step: int, tmp_path: Path) -> None:
    model = tiny(lora={"target_modules": ["q_proj"]})
    trainer = jobs.build(str(tmp_path), GREEDY, model=model, train_dataset=sequences(60))
    weight = model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.weight")
    if step:
        trainer.add_callback(Unfreeze(weight))
    else:
        weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight .*was frozen.*before HelixTrainer is made"):
        trainer.train()
    assert trainer.state.global_step == step


# -- the Trainer, files --------------------------------------------------------------------------------------------

TRAINED: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": EVERYWHERE[:-1]},
    "gpt2": {"target_modules": OF_GPT2, "fan_in_fan_out": True},
    "mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "qwen3_moe": {},
    "llama, pissa": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa", "use_rslora": True},
    "llama, kept": {"modules_to_save": ["lm_head", "norm"], "target_modules": ["q_proj", "up_proj"], "idle": "other"},
    f"{HOME}phi3": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    f"{HOME}deepseek_v3": {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    f"{HOME}qwen3_5": {"target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "q_proj", "v_proj"]},
    f"{HOME}nemotron_h": {"target_modules": ["in_proj", "q_proj", "up_proj"]},  # PEFT leaves a mixer's output alone
}
"""By family, the adapters."""
TP, PP = {"tp_size": 2}, {"pp_size": 2}


@pytest.mark.parametrize(
    ("case", "helix"),
    [
        ("llama, kept", PP),
        ("llama", {"shard_parameters": True}),
        ("gpt2", {"shard_optimizer": True}),
        slow("gpt2", {**TP, "shard_parameters": True}),
        ("mixtral", {"ep_size": 2, "shard_optimizer": True}),
        slow("mixtral", {"shard_parameters": True}),
        slow("qwen3_moe", {**TP, "shard_parameters": True}),
        slow("qwen3_moe", {**PP, "ep_size": 2, "shard_optimizer": True}),
        slow("llama, pissa", TP),
        slow("llama", {**TP, **PP}),
        slow("gpt2", {**TP, **PP}),
        slow("llama", {"cp_size": 2}),
        slow(f"{HOME}phi3", TP),
        slow(f"{HOME}deepseek_v3", PP),
        slow(f"{HOME}qwen3_5", TP),
        slow(f"{HOME}nemotron_h", PP),
    ],
    ids=str,
)
def test_training_equals_the_stock_trainer(
    case: str, helix: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """Losses, norms, evaluation; and the files of the adapters, which stock PEFT loads, runs and merges. Where ranks
    share parameters or the optimizer, the stock Trainer runs on two processes (DDP)."""
    model = {"family": case.partition(",")[0], "num_hidden_layers": 4 if HOME in case else 5}
    training = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    job = {"model": {**model, "lora": TRAINED[case]}, "training": training}
    dp = 2 if any(name.startswith("shard") for name in helix) else 1
    expected, theirs = stock(jobs.train, dp, **job)
    ranks = dp * 2 ** len(helix.keys() & {*TP, *PP, "cp_size"})
    for result in cluster_of(ranks).run("train", folder=str(tmp_path), helix={**helix, **GREEDY}, **job):
        compare_runs(result, expected, steps=4)
        assert dp > 1 or result["flos"] == expected["flos"]
    compare_adapters(tmp_path, Path(theirs))
    loaded = PeftModel.from_pretrained(tiny(**model), tmp_path).eval()
    logits = logits_of(loaded)
    assert not torch.equal(logits, logits_of(tiny(**model).eval()))
    torch.testing.assert_close(logits, logits_of(PeftModel.from_pretrained(tiny(**model), theirs).eval()))
    torch.testing.assert_close(logits_of(loaded.merge_and_unload()), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("helix", "model"),
    [
        (TP, {"family": "mixtral", "lora": {}}),
        (PP, {"lora": {"target_modules": ["embed_tokens", "q_proj"]}}),
        (TP, {"lora": {"target_modules": ["o_proj", "q_proj"], "use_dora": True}}),
        ({"ep_size": 2, "shard_optimizer": True}, {"family": "mixtral", "lora": {}}),
    ],
    ids=str,
)
def test_lora_plus(helix: dict[str, Any], model: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path) -> None:
    """PEFT's optimizer with groups of parameters, made before the model is cut."""
    job = {"model": {"num_hidden_layers": 4, **model}, "training": {"max_steps": 4}}
    expected, theirs = stock(train_by_lora_plus, 2 if "ep_size" in helix else 1, **job)
    for result in cluster_of(2).run(train_by_lora_plus, folder=str(tmp_path), helix={**helix, **GREEDY}, **job):
        compare_runs(result, expected, steps=4)
    compare_adapters(tmp_path, Path(theirs))


@pytest.mark.parametrize(
    ("kind", "helix"),
    [
        ("olora", PP),
        slow("olora", TP),
        slow("pissa", PP),
        slow("pissa_niter_4", TP),
        slow("eva", TP),
        slow("eva", PP),
        slow("corda", TP),
        slow("corda", PP),
        slow("orthogonal", TP),
        slow("gaussian", {"shard_parameters": True}),
    ],
    ids=str,
)
def test_adapters_that_peft_makes_of_weights_or_values(
    kind: str, helix: dict[str, Any], cluster_of: Any, stock: Any, tmp_path: Path
) -> None:
    """PEFT reads, and some kinds change, the weights of the model before it is cut."""
    if kind == "corda":
        pytest.importorskip("attr")
    job = {"kind": kind, "training": {"max_steps": 3}}
    expected, theirs = stock(train_initialised, 2 if "shard_parameters" in helix else 1, **job)
    for result in cluster_of(2).run(train_initialised, folder=str(tmp_path), helix={**helix, **GREEDY}, **job):
        compare_runs(result, expected, steps=3)
    compare_adapters(tmp_path, Path(theirs))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 18).unsqueeze(0)).logits


KEPT = {"modules_to_save": ["embed_tokens"], "idle": "other"}


def test_what_is_saved_untrained_is_bit_for_bit_what_it_was(cluster_of: Any, tmp_path: Path) -> None:
    job = {"helix": {**TP, **GREEDY}, "model": {"num_hidden_layers": 5, "lora": KEPT}}
    cluster_of(2).run("save_untrained", folder=str(tmp_path / "ours"), **job)
    tiny(num_hidden_layers=5, lora=KEPT).save_pretrained(str(tmp_path / "theirs"))
    result = sorted((tmp_path / "theirs").rglob("*.safetensors"))
    assert len(result) == 2
    for file in result:
        theirs = load_file(file)
        ours = load_file(tmp_path / "ours" / file.relative_to(tmp_path / "theirs"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = {"lora": {"target_modules": ["q_proj"]}}
    tiny(**model).save_pretrained(str(tmp_path))
    load_into(str(tmp_path), {}, model)
    with pytest.raises(ValueError, match=r"lora_A.default.weight is \[3, 32\] there, and \[2, 32\] in the model"):
        load_into(str(tmp_path), {}, {"lora": {"target_modules": ["q_proj"], "r": 2}})
    with pytest.raises(ValueError, match=r"nothing for .*k_proj.lora_A.default.weight"):
        load_into(str(tmp_path), {}, {"lora": {"target_modules": ["q_proj", "k_proj"]}})
    with pytest.raises(ValueError, match=r"other.adapter_model.safetensors is missing"):
        load_into(str(tmp_path), {}, {"lora": {"target_modules": ["q_proj"], "idle": "other"}})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
        load_into(str(tmp_path), {}, model)


CHOICES = {"num_hidden_layers": 2, "lora": {"modules_to_save": ["lm_head"], "idle": "other"}}
"""Of whose linears run time decides what they read: a head or its copy, and one of two adapters or none."""


def test_evaluation_with_what_was_idle_when_it_was_spread(cluster_of: Any, tmp_path: Path) -> None:
    """Without adapters, the head is the frozen one."""
    job = {"folder": str(tmp_path), "model": CHOICES, "bf16": True}
    expected = evaluations(helix=None, **job)
    assert len({*expected.values()}) == 3
    assert expected["trained"] == expected["again"]
    assert evaluations(helix={}, **job) == pytest.approx(expected, abs=1e-2)
    for result in cluster_of(2).run(evaluations, helix={"shard_parameters": True, **GREEDY}, **job):
        assert result == pytest.approx(expected, abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["shard_parameters", "shard_optimizer"])
def test_training_what_was_idle_when_it_was_spread(option: str, cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "model": CHOICES, "max_grad_norm": 1e6, "bf16": True}
    whole, spread = (cluster_of(2).run(train_the_idle_one, helix={option: on, **GREEDY}, **job) for on in (False, True))
    assert spread == whole
    assert len({*whole[0]}) == len(whole[0])


def test_a_model_in_bf16_with_adapters_in_fp32(cluster_of: Any, tmp_path: Path) -> None:
    """As PEFT makes them; the model itself stays in bf16, and so do its files' counterparts in fp32."""
    training = {"bf16": True, "max_steps": 2}
    job = {"model": {"dtype": "bfloat16", "num_hidden_layers": 2, "lora": {}}, "training": training}
    expected = jobs.train(str(tmp_path / "theirs"), None, **job)
    (first, second) = cluster_of(2).run("train", folder=str(tmp_path / "ours"), helix={"tp_size": 2, **GREEDY}, **job)
    np.testing.assert_allclose(first["losses"], expected["losses"], rtol=0.02)
    assert first["losses"] == second["losses"]
    saved = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


# -- refusals ------------------------------------------------------------------------------------------------------


def refused(model: Any, folder: Path, *words: str) -> None:
    with pytest.raises(ValueError, match="adapters") as caught:
        HelixTrainer(model=model, args=arguments(str(folder)), helix_config=HelixConfig())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alora_invocation_tokens": [5, 6]}, ["alora_invocation_tokens=[5, 6]", "leave it out"]),
        ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices", "modules_to_save=['embed_tokens']"]),
        ({"layer_replication": [(0, 2), (1, 3)]}, ["layer_replication", "leave it out"]),
        ({"modules_to_save": ["mlp"], "target_modules": ["q_proj"]}, ["layers.0.mlp is kept whole", "modules_to_save"]),
    ],
    ids=str,
)
def test_options_of_lora(options: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    config = LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **options})
    refused(get_peft_model(llama(), config), tmp_path, *words)


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        VeraConfig(r=2, target_modules=["q_proj"]),
        AdaLoraConfig(target_modules=["q_proj"], total_step=10),
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_kinds_of_adapters(config: Any, tmp_path: Path) -> None:
    refused(get_peft_model(llama(), config), tmp_path, type(config).__name__, "get_peft_model(model, LoraConfig(...))")


def test_models_that_are_not_as_peft_makes_them(tmp_path: Path) -> None:
    refused(tiny(lora={}).base_model.model, tmp_path, "no PeftModel around it", "merge_and_unload()")
    mixed = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]), mixed=True)
    refused(mixed, tmp_path, "PeftMixedModel", "LoraConfig")
    merged = tiny(lora={})
    merged.merge_adapter()
    refused(merged, tmp_path, "merged adapters (default)", "unmerge_adapter()")

    # Bases that cannot be cut.
    class Linear4bit(nn.Linear):
        """What quantised layers derive from."""

    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = Linear4bit
    refused(adapted(model), tmp_path, "self_attn.q_proj is a peft.", "Linear4bit", "without quantization_config")
    transposed = adapted(tiny("gpt2"), target_modules=["lm_head"], target_parameters=["c_fc.weight"])
    refused(transposed, tmp_path, "mlp.c_fc has adapters of its parameter 'weight'", "Conv1D", "in target_modules")


def test_adapters_that_are_not_trained(tmp_path: Path) -> None:
    tiny(lora={}).save_pretrained(str(tmp_path / "adapter"))
    model = PeftModel.from_pretrained(llama(), str(tmp_path / "adapter"))
    data = {"train_dataset": sequences(4), "eval_dataset": sequences(4)}
    trainer = jobs.build(str(tmp_path), {}, model=model, **data)
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    with pytest.raises(ValueError, match=r"no weight .* is trained.*is_trainable=True"):
        trainer.train()
