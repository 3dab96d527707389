"""Train a reward model on preferences with TRL's RewardTrainer, over several ranks, communication behind computation.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/reward.py
    accelerate launch --config_file LAYOUT recipes/reward.py --model_name_or_path MODEL --dataset_name PAIRS

In:   a model with its tokenizer and a dataset, both as of dpo.py, and the layout in the launcher's YAML. Without them,
      those of dpo.py.
Out:  an ordinary Hugging Face checkpoint of a model for sequence classification with one label, the reward.

Every field of TRL's RewardConfig and ModelConfig is a flag, too.
"""

import torch
from dpo import DEFAULTS, make_tiny, read_preferences
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser, get_peft_config

from hf_helix import HelixTrainerMixin


class HelixRewardTrainer(HelixTrainerMixin, RewardTrainer):
    """TRL's trainer on a model that is cut over the ranks."""


def main() -> None:
    parser = TrlParser((ScriptArguments, RewardConfig, ModelConfig))
    parser.set_defaults(**{**DEFAULTS, "output_dir": "runs/reward"})
    script, args, options = parser.parse_args_and_config()
    set_seed(args.seed)
    name = options.model_name_or_path or make_tiny(args)
    pairs = read_preferences(script.dataset_name, script.dataset_train_split).train_test_split(test_size=0.1, seed=0)

    set_seed(args.seed)  # the head's weights are drawn alike on all ranks
    trainer = HelixRewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype=torch.float32),
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
        print(f"\nheld-out pairs: loss {metrics['eval_loss']:.3f}, right {metrics['eval_accuracy']:.0%}")
        print(f"plan {trainer.plan.rule}; checkpoint: {args.output_dir}")


if __name__ == "__main__":
    main()
