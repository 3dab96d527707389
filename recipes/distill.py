"""Distil a causal language model into one with fewer layers, over several ranks; the teacher is cut as well.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/distill.py \\
        --teacher_name_or_path runs/demo
    accelerate launch --config_file LAYOUT recipes/distill.py --teacher_name_or_path MODEL --text corpus.jsonl

In:   a teacher with its tokenizer (a folder, such as the one that `make demo` leaves, or a name), a text, and the
      layout in the launcher's YAML.
Out:  an ordinary Hugging Face checkpoint of the student: the teacher's first layers, embedding and head, trained to
      give the teacher's probabilities.

Every field of TrainingArguments is a flag, too.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from pretrain import DEFAULTS, check_sizes, pack, read_documents, split
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_helix import HelixTrainer


@dataclass
class DistillArguments:
    """The teacher, the student's size, and the text."""

    teacher_name_or_path: str = field(metadata={"help": "a model with its tokenizer: a folder or a name"})
    student_layers: int = field(default=2, metadata={"help": "the student's layers: the teacher's first ones"})
    dtype: str = field(default="float32", metadata={"help": "of the teacher: float32 or bfloat16"})
    text: str = field(default="", metadata={"help": "as of pretrain.py; default: Python's docs"})
    text_column: str = field(default="text", metadata={"help": "where the text is in a JSONL file or dataset"})
    sequence_length: int = field(default=128, metadata={"help": "documents are packed and cut to this"})


class Distiller(HelixTrainer):
    """Trains on the divergence from a teacher's probabilities, a mean over tokens."""

    teacher: Any = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.float().log_softmax(-1)
        found = outputs.logits.float().log_softmax(-1)
        loss = functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1).mean()
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    parser = HfArgumentParser((DistillArguments, TrainingArguments))
    parser.set_defaults(**{**DEFAULTS, "output_dir": "runs/distill", "prediction_loss_only": True})
    recipe, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    name = recipe.teacher_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name)
    teacher = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, recipe.dtype))
    check_sizes(teacher.config, len(tokenizer), recipe.sequence_length)
    student = AutoModelForCausalLM.from_pretrained(name, num_hidden_layers=recipe.student_layers, dtype=torch.float32)
    training, held_out = split(pack(read_documents(recipe.text, recipe.text_column), tokenizer, recipe.sequence_length))

    trainer = Distiller(
        model=student,
        args=args,
        train_dataset=training,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.teacher = trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"\ndivergence from the teacher on held-out text: {before:.3f} before, {after:.3f} after")
        print(f"plan {trainer.plan.rule}; checkpoint: {args.output_dir}")


if __name__ == "__main__":
    main()
