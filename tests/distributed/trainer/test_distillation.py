"""A teacher of another class in a script's own `compute_loss`: the stock figures, and a part of it on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.marks import slow
from support.models import SMALL, arguments
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Trainer

from hf_helix import HelixConfig, HelixTrainer
from hf_helix.runtime.divided import plain_parameters

TIMES = 8  # the teacher's size over the student's, at least
LARGE = {**SMALL, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 6}


class Distilled:
    """Learns a teacher's distribution, by the lines that docs/losses.md shows."""

    teacher: Any = None

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits[:, :-1].float().log_softmax(-1)
        found = outputs.logits[:, :-1].float().log_softmax(-1)
        per_token = functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        loss = per_token[labels[:, 1:] != -100].sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def follow(folder: str, helix: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    student = LlamaForCausalLM(LlamaConfig(**SMALL))
    teacher = Qwen2ForCausalLM(Qwen2Config(**{**LARGE, "num_key_value_heads": 2}))
    size = sum(each.numel() for each in teacher.parameters())
    assert size > TIMES * sum(each.numel() for each in student.parameters())
    generator = torch.Generator().manual_seed(3)
    rows = [{"input_ids": ids, "labels": ids.clone()} for ids in torch.randint(1, 127, (24, 14), generator=generator)]
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 3}
    base = Trainer if helix is None else HelixTrainer
    given = {} if helix is None else {"helix_config": HelixConfig(plan="greedy", cache=False, **helix)}
    kind: Any = type("Mine", (Distilled, base), {})
    trainer = kind(model=student, args=arguments(folder, **training), train_dataset=rows, **given)
    trainer.teacher = trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
    trainer.train()
    with plain_parameters():
        here = sum(each.numel() for each in teacher.parameters()) / size
    log = [
        {name: entry[name] for name in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry
    ]
    return {"log": log, "here": here}


@pytest.mark.parametrize("helix", [{"tp_size": 2}, slow({"pp_size": 2}), slow({"cp_size": 2})], ids=str)
def test_a_large_teacher_of_another_class(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    wanted = follow(str(tmp_path / "stock"), None)
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "helix"), helix=helix):
        for found, stock in zip(result["log"], wanted["log"], strict=True):
            assert found == pytest.approx(stock, rel=1e-4)
        assert (result["here"] < 0.6) == ("cp_size" not in helix), "context parallelism cuts no weights"
