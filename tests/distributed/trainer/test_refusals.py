"""Bad input is refused at construction, on every rank, naming the option and a value that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.models import arguments, llama, sequences
from transformers import MambaConfig, MambaForCausalLM

from hf_helix import HelixConfig, HelixPlugin, HelixTrainer

TRAINING = [
    ({"fp16": True}, ["fp16=False", "scaler", "bf16=True"]),
    ({"torch_compile": True}, ["torch_compile=False"]),
    ({"auto_find_batch_size": True}, ["auto_find_batch_size=False"]),
    ({"use_liger_kernel": True}, ["use_liger_kernel=False"]),
    ({"bf16_full_eval": True}, ["bf16_full_eval=False"]),
    ({"optim": "lomo"}, ["lomo", "adamw_torch"]),
]


@pytest.mark.parametrize(("changes", "words"), TRAINING, ids=lambda value: str(value)[:30])
def test_training_arguments(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot honour") as caught:
        jobs.make_trainer(str(tmp_path), {}, training=changes)
    for word in [*words, next(iter(changes))]:
        assert word in str(caught.value)


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)auto_find_batch_size.*optim"):
        jobs.make_trainer(str(tmp_path), {}, training={"optim": "lomo", "auto_find_batch_size": True})


def test_fields_set_by_hand_are_seen_too(tmp_path: Path) -> None:
    args = arguments(str(tmp_path))
    args.fp16, args.fsdp, args.deepspeed = True, "full_shard", "ds.json"
    with pytest.raises(ValueError, match=r"(?s)fp16.*deepspeed.*fsdp"):
        HelixTrainer(model=llama(), args=args, helix_config=HelixConfig())


def test_unsupported_model(tmp_path: Path) -> None:
    model = MambaForCausalLM(MambaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=16))
    with pytest.raises(ValueError, match=r"MambaForCausalLM cannot be derived: .*register_model.*hf-helix models"):
        HelixTrainer(model=model, args=arguments(str(tmp_path)), helix_config=HelixConfig())


def test_models_of_other_types(tmp_path: Path) -> None:
    def refused(model: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            HelixTrainer(model=model, args=arguments(str(tmp_path)), helix_config=HelixConfig())

    refused(llama().half(), r"float16.*dtype=torch.float32.*dtype=torch.bfloat16")
    mixed = llama()
    mixed.lm_head.bfloat16()
    refused(mixed, r"lm_head.weight is torch.bfloat16, others are torch.float32.*one type")


def test_mixed_precision_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` hands it over in the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"mixed_precision='fp16'.*bf16.*scaler"):
        jobs.make_trainer(str(tmp_path), {})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = jobs.make_trainer(str(tmp_path), {})
    assert trainer.helix.runner.precision.autocast_dtype is torch.bfloat16


def test_own_loss_functions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compute_loss_func"):
        jobs.make_trainer(str(tmp_path), {}, compute_loss_func=lambda *_, **__: 0)

    class Mine(HelixTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match="Mine overrides compute_loss"):
        Mine(model=llama(), args=arguments(str(tmp_path)), helix_config=HelixConfig())


def test_batches_without_labels(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in sequences(4)]
    trainer = HelixTrainer(model=llama(), args=arguments(str(tmp_path)), train_dataset=rows, helix_config=HelixConfig())
    with pytest.raises(ValueError, match=r"no labels.*DataCollatorForLanguageModeling"):
        trainer.train()


def test_measuring_without_a_window(tmp_path: Path) -> None:
    trainer = jobs.make_trainer(str(tmp_path), {})
    with pytest.raises(ValueError, match="after train"):
        trainer.measure_overlap()


def test_one_process_and_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tp_size=2 must divide.*1 process.*values that work: 1\..*MULTI_GPU"):
        jobs.make_trainer(str(tmp_path), {"tp_size": 2})


def test_ranks_that_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes, but this one runs alone.*use_cpu=True"):
        HelixTrainer(model=llama(), args=args, helix_config=HelixConfig(tp_size=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"helix": {"tp_size": 3}}, ["tp_size=3", "world size, 2", "1, 2"]),
        (
            {"helix": {"tp_size": 2}, "model": {"num_key_value_heads": 1}},
            ["4 attention heads", "1 key-value", "work: 1"],
        ),
        (
            {"helix": {"tp_size": 2}, "model": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}},
            ["3 attention heads", "work: 1, 3"],
        ),
        ({"helix": {"tp_size": 2, "pp_size": 2}}, ["pp_size=2", "1 process that tp_size=2 leaves of 2", "work: 1"]),
    ],
)
def test_sizes_that_do_not_divide(options: dict[str, Any], words: list[str], cluster_of: Any, tmp_path: Path) -> None:
    for failure in cluster_of(2).errors("construct", folder=str(tmp_path), **options):
        assert failure.kind == "ValueError"
        for word in words:
            assert word in failure.message


def test_plan_files(cluster_of: Any, tmp_path: Path) -> None:
    cluster, path = cluster_of(2), tmp_path / "plan.json"
    helix = {"tp_size": 2, "plan": "round_robin"}
    text = cluster.run("save_plan", folder=str(tmp_path), helix=helix, path=str(path))[0]

    def message(content: str, **options: Any) -> str:
        path.write_text(content)
        helix = {"tp_size": 2, "plan": str(path), **options.pop("helix", {})}
        failures = cluster.errors("construct", folder=str(tmp_path), helix=helix, **options)
        assert len({failure.message for failure in failures}) == 1
        assert "plan='auto'" in failures[0].message
        return failures[0].message

    data = json.loads(text)
    assert "mesh" in message(text, helix={"tp_size": 1})
    assert "Other" in message(json.dumps({**data, "model": "Other"}))
    assert "format" in message(json.dumps({**data, "format": "hf_helix.plan/0"}))
    assert "damaged" in message(text[: len(text) // 2])
    swapped = json.loads(text)
    order = swapped["blocks"]["F.layer | B.layer"]
    order[0], order[-1] = order[-1], order[0]
    assert "-->" in message(json.dumps(swapped))


def test_plugin_and_trainer_take_options_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        HelixPlugin(HelixConfig(), tp_size=1)
    with pytest.raises(ValueError, match=r"did you mean 'tp_size'"):
        HelixPlugin(tp_sise=2)
    with pytest.raises(TypeError, match="must be a HelixConfig"):
        HelixTrainer(model=llama(), args=arguments(str(tmp_path)), helix_config={"tp_size": 1})  # type: ignore[arg-type]


def test_different_plans_on_two_ranks(cluster_of: Any, tmp_path: Path) -> None:
    for failure in cluster_of(2).errors("construct_with_plan_of_rank", folder=str(tmp_path)):
        assert failure.kind == "ValueError"
        assert "rank 0 and rank 1 have different plans: line" in failure.message


def test_different_batches_on_two_ranks(cluster_of: Any, tmp_path: Path) -> None:
    for failure in cluster_of(2).errors("train_on_data_of_rank", folder=str(tmp_path)):
        assert failure.kind == "ValueError"
        assert "got different batches: input_ids, labels differ" in failure.message
        assert "split_dataset_by_node" in failure.message
        assert "seed" in failure.message


def test_a_cut_model_cannot_be_called(cluster_of: Any, tmp_path: Path) -> None:
    for failure in cluster_of(2).errors("call_the_cut_model", folder=str(tmp_path)):
        assert failure.kind == "RuntimeError"
        assert "save_model" in failure.message


def test_a_model_that_was_cut_before(cluster_of: Any, tmp_path: Path) -> None:
    for failure in cluster_of(2).errors("cut_twice", folder=str(tmp_path)):
        assert failure.kind == "ValueError"
        assert "cut by an earlier HelixTrainer" in failure.message
        assert "from_pretrained" in failure.message


def test_optimizers_that_look_at_whole_tensors(tmp_path: Path) -> None:
    model, config = llama(), HelixConfig(shard_optimizer=True)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match=r"optimizers=\(LBFGS, .*use one of AdamW"):
        HelixTrainer(model=model, args=arguments(str(tmp_path)), optimizers=(optimizer, None), helix_config=config)
    with pytest.raises(ValueError, match=r"optimizer_cls_and_kwargs=\(Adafactor, .*use one of AdamW"):
        jobs.make_trainer(
            str(tmp_path), {"shard_optimizer": True}, optimizer_cls_and_kwargs=(torch.optim.Adafactor, {"lr": 1e-3})
        )


def test_label_smoothing_and_balanced_experts(tmp_path: Path) -> None:
    """The stock Trainer takes the smoothed loss instead of the model's, balance and all."""
    with pytest.raises(
        ValueError, match=r"label_smoothing_factor=0.1.*label_smoothing_factor=0.0.*output_router_logits"
    ):
        jobs.make_trainer(
            str(tmp_path),
            {},
            model={"family": "mixtral", "output_router_logits": True},
            training={"label_smoothing_factor": 0.1},
        )


def test_an_optimizer_passed_in_is_used(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    args = arguments(str(tmp_path), max_steps=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = HelixTrainer(
        model=model, args=args, train_dataset=sequences(8), optimizers=(optimizer, None), helix_config=HelixConfig()
    )
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_that_no_operator_declares(tmp_path: Path) -> None:
    model = llama()
    model.model.layers[0].self_attn.q_norm = torch.nn.LayerNorm(8)
    with pytest.raises(ValueError, match=r"no operator for model\.layers\.0\.self_attn\.q_norm\.weight"):
        HelixTrainer(model=model, args=arguments(str(tmp_path)), helix_config=HelixConfig())


def test_no_training_arguments_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock Trainer makes its own; so do we."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for trainer in (
        HelixTrainer(llama(), helix_config=HelixConfig()),
        HelixTrainer(llama(), None, helix_config=HelixConfig()),
    ):
        assert trainer.args.output_dir == "tmp_trainer"


def test_repeats_of_a_measurement(cluster_of: Any, tmp_path: Path) -> None:
    trainer = jobs.make_trainer(str(tmp_path), {}, training={"max_steps": 1})
    trainer.train()
    with pytest.raises(ValueError, match="repeats=0"):
        trainer.measure_overlap(repeats=0)
