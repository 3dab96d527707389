"""Train LoRA adapters of a causal language model over several ranks, and hand them to stock PEFT.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/lora.py --model_name_or_path runs/demo
    accelerate launch --config_file accelerate_configs/cpu_pp2.yaml recipes/lora.py --model_name_or_path runs/demo \\
        --load_in_4bit
    accelerate launch --config_file accelerate_configs/gpu_tp2.yaml recipes/lora.py --model_name_or_path MODEL \\
        --text corpus.jsonl --dtype bfloat16 --bf16

In:   a model with its tokenizer (a folder, such as the one that `make demo` leaves, or a name), a text, and the layout
      in the launcher's YAML.
Out:  a folder that `PeftModel.from_pretrained(model, folder)` loads; what the merged model writes.
Must hold: nothing is downloaded unless it is named. hf_helix is not needed to load what is saved.

Every field of TrainingArguments is a flag, too.
"""

from dataclasses import dataclass, field

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pretrain import DEFAULTS, card_of, check_sizes, generate, pack, read_documents, split
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    PreTrainedModel,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_helix import HelixTrainer
from hf_helix.tuning.result_text import format_scorecard


@dataclass
class AdapterArguments:
    """What to adapt, how, and on what."""

    model_name_or_path: str = field(metadata={"help": "a model with its tokenizer: a folder or a name"})
    dtype: str = field(default="float32", metadata={"help": "to load it in: float32 or bfloat16"})
    load_in_4bit: bool = field(default=False, metadata={"help": "keep its linears in 4 bits (needs bitsandbytes)"})
    lora_r: int = field(default=16, metadata={"help": "the rank of the adapters"})
    lora_alpha: int = field(default=32, metadata={"help": "their scale, times the rank"})
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout in front of them"})
    target_modules: str = field(
        default="all-linear", metadata={"help": "which linears, separated by commas, such as q_proj,v_proj"}
    )
    text: str = field(default="", metadata={"help": "as of pretrain.py; default: Python's docs"})
    text_column: str = field(default="text", metadata={"help": "where the text is in a JSONL file or dataset"})
    prompt: str = field(default="The class", metadata={"help": "what the merged model goes on from"})
    sequence_length: int = field(default=256, metadata={"help": "documents are packed and cut to this"})


def main() -> None:
    parser = HfArgumentParser((AdapterArguments, TrainingArguments))
    parser.set_defaults(**{**DEFAULTS, "output_dir": "runs/lora", "learning_rate": 1e-3, "weight_decay": 0.0})
    recipe, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(recipe.model_name_or_path)
    dtype = getattr(torch, recipe.dtype)
    packing = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    options = {"quantization_config": BitsAndBytesConfig(**packing)} if recipe.load_in_4bit else {}
    base = AutoModelForCausalLM.from_pretrained(recipe.model_name_or_path, dtype=dtype, **options)
    check_sizes(base.config, len(tokenizer), recipe.sequence_length)
    documents = read_documents(recipe.text, recipe.text_column)
    training, held_out = split(pack(documents, tokenizer, recipe.sequence_length))
    targets = recipe.target_modules.split(",")
    config = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=targets if len(targets) > 1 else recipe.target_modules,
        task_type="CAUSAL_LM",
    )

    trainer = HelixTrainer(
        model=get_peft_model(base, config),
        args=args,
        train_dataset=training,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    overlap = trainer.measure_overlap()
    trainer.save_model()
    trainer.create_model_card(**card_of(recipe.text))
    if trainer.is_world_process_zero():
        print(f"\nloss on held-out text: {before:.3f} before, {after:.3f} after")
        print(format_scorecard(overlap, trainer.plan.rule))
        print(f"adapters: {args.output_dir}")
        model = merged(recipe.model_name_or_path, args.output_dir)
        print(f"merged, it writes: {generate(model, args.output_dir, recipe.prompt)!r}")


def merged(model_name: str, folder: str) -> PreTrainedModel:
    """The model with its adapters merged, loaded as anybody would load it."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_name), folder).merge_and_unload()


if __name__ == "__main__":
    main()
