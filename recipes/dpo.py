"""Train on preferences with TRL's DPOTrainer, over several ranks, communication behind computation.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/dpo.py
    accelerate launch --config_file LAYOUT recipes/dpo.py --model_name_or_path MODEL --dataset_name PAIRS --use_peft

In:   a model with its tokenizer, a dataset (a name, or a folder of JSONL files) with prompt, chosen and rejected, and
      the layout in the launcher's YAML. Without them, a tiny model with random weights and Python's documentation of
      its topics, preferred to the same in capitals.
Out:  an ordinary Hugging Face checkpoint with its tokenizer; with `--use_peft`, adapters.

Every field of TRL's DPOConfig and ModelConfig is a flag, too.
"""

from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from pretrain import MODELS, make_tokenizer, read_config
from sft import read_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, set_seed
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from hf_helix import HelixTrainerMixin


class HelixDPOTrainer(HelixTrainerMixin, DPOTrainer):
    """TRL's trainer on a model that is cut over the ranks."""


DEFAULTS = {
    "output_dir": "runs/dpo",
    "use_cpu": not torch.cuda.is_available(),
    "bf16": torch.cuda.is_available(),
    "gradient_checkpointing": False,
    "max_steps": 10,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def main() -> None:
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS)
    script, args, options = parser.parse_args_and_config()
    set_seed(args.seed)
    name = options.model_name_or_path or make_tiny(args)
    pairs = read_preferences(script.dataset_name, script.dataset_train_split).train_test_split(test_size=0.1, seed=0)

    trainer = HelixDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        args=args,
        train_dataset=pairs["train"],
        eval_dataset=pairs["test"],
        processing_class=AutoTokenizer.from_pretrained(name),
        peft_config=get_peft_config(options),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"\nheld-out pairs: loss {metrics['eval_loss']:.3f}, right {metrics['eval_rewards/accuracies']:.0%}")
        print(f"plan {trainer.plan.rule}; checkpoint: {args.output_dir}")


def read_preferences(name: str | None, split: str = "train") -> Dataset:
    """Prompts, each with a chosen and a rejected completion."""
    if name:
        return load_dataset(name, split=split)
    texts = {row["prompt"]: row["completion"][:80] for row in read_pairs()}
    rows = [{"prompt": name, "chosen": text, "rejected": text.upper()} for name, text in texts.items()]
    return Dataset.from_list(rows)


def make_tiny(args: TrainingArguments, model: str = "tiny-llama") -> str:
    """A folder with a tiny model of random weights and its tokenizer; a Llama, or another folder of `models`."""
    folder = Path(args.output_dir, "start")
    config = read_config(str(MODELS / model), "")
    with args.main_process_first(local=False):  # one writes for all machines
        if args.process_index == 0:
            pairs = read_pairs()
            make_tokenizer([*pairs["prompt"], *pairs["completion"]], config.vocab_size, folder)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
