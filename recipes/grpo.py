"""Train on rewards of the model's own completions with TRL's GRPOTrainer, over several ranks.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/grpo.py
    accelerate launch --config_file accelerate_configs/cpu_ep2.yaml recipes/grpo.py --tiny tiny-mixtral \\
        --use_peft --lora_target_modules all-linear
    accelerate launch --config_file LAYOUT recipes/grpo.py --model_name_or_path MODEL --dataset_name PROMPTS \\
        --reward_model runs/reward --beta 0.04

In:   a model with its tokenizer, a dataset (a name, or a folder of JSONL files) with prompts, perhaps a reward model
      with its tokenizer, such as the one that reward.py leaves, and the layout in the launcher's YAML. Without them, a
      tiny model with random weights, the questions of sft.py, and a reward for the letter e.
Out:  an ordinary Hugging Face checkpoint with its tokenizer.

The cut model generates the completions; with `--use_vllm --vllm_mode server`, a server of vLLM does. Adapters of
`all-linear` are on attention and on the experts of a mixture. Every field of TRL's GRPOConfig and ModelConfig is a
flag, too.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset, load_dataset
from dpo import DEFAULTS, make_tiny
from sft import read_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from hf_helix import HelixTrainerMixin


class HelixGRPOTrainer(HelixTrainerMixin, GRPOTrainer):
    """TRL's trainer on a model that is cut over the ranks."""


@dataclass
class RecipeArguments(ScriptArguments):
    """What to train on, and for what."""

    reward_model: str = field(default="", metadata={"help": "a folder or a name; default: a reward for the letter e"})
    tiny: str = field(default="tiny-llama", metadata={"help": "the tiny model, a folder of recipes/models"})


GENERATION = {"num_generations": 4, "max_completion_length": 16, "max_steps": 16, "learning_rate": 1e-2}
ADAPTERS = {"lora_dropout": 0.0}  # PEFT has none for adapters of experts


def main() -> None:
    parser = TrlParser((RecipeArguments, GRPOConfig, ModelConfig))
    parser.set_defaults(**{**DEFAULTS, "output_dir": "runs/grpo", **GENERATION, **ADAPTERS})
    script, args, options = parser.parse_args_and_config()
    set_seed(args.seed)
    name = options.model_name_or_path or make_tiny(args, script.tiny)

    trainer = HelixGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        reward_funcs=script.reward_model or share_of_e,
        args=args,
        train_dataset=read_prompts(script.dataset_name, script.dataset_train_split),
        processing_class=AutoTokenizer.from_pretrained(name),
        peft_config=get_peft_config(options),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print(f"\nmean reward: {rewards[0]:.3f} in the first logged steps, {rewards[-1]:.3f} in the last")
        print(f"plan {trainer.plan.rule}; checkpoint: {args.output_dir}")


def share_of_e(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of the letter e among the characters of each completion."""
    return [text.count("e") / max(len(text), 1) for text in completions]


def read_prompts(name: str | None, split: str) -> Dataset:
    return load_dataset(name, split=split) if name else read_pairs().select_columns(["prompt"])


if __name__ == "__main__":
    main()
