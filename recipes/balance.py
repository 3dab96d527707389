"""Pretrain a mixture of experts whose routers are balanced without a loss: biases follow the load of the experts.

    accelerate launch --config_file accelerate_configs/cpu_ep2.yaml recipes/balance.py
    accelerate launch --config_file LAYOUT recipes/balance.py --model_name_or_path MODEL --text corpus.jsonl

In:   a model of DeepSeek-V3's kind with its tokenizer (a folder or a name), a text, and the layout in the launcher's
      YAML. Without them, a tiny DeepSeek-V3 with random weights and Python's documentation.
Out:  an ordinary Hugging Face checkpoint with its tokenizer, and how uneven the experts were at first and at last.

`BalanceExperts` works with every trainer of hf_helix: `trainer.add_callback(BalanceExperts(trainer))`. Every field of
TrainingArguments is a flag, too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain import DEFAULTS, check_sizes, make_model, make_tokenizer, pack, read_documents, split
from transformers import (
    AutoTokenizer,
    DeepseekV3Config,
    HfArgumentParser,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_helix import HelixTrainer


@dataclass
class BalanceArguments:
    """What to train, and how fast the biases move."""

    model_name_or_path: str = field(default="", metadata={"help": "default: a tiny DeepSeek-V3 with random weights"})
    rate: float = field(default=0.001, metadata={"help": "what a bias moves by in a step; 0 to leave them"})
    text: str = field(default="", metadata={"help": "as of pretrain.py; default: Python's docs"})
    text_column: str = field(default="text", metadata={"help": "where the text is in a JSONL file or dataset"})
    sequence_length: int = field(default=64, metadata={"help": "documents are packed and cut to this"})


class BalanceExperts(TrainerCallback):
    """After each step, raises the biases of experts with less than the mean load, and lowers the others
    (arXiv 2408.15664, algorithm 1).

    Args:
        trainer: of hf_helix, whose model has biases in its routers.
        rate: what a bias moves by.
    """

    def __init__(self, trainer: Any, rate: float = 0.001) -> None:
        self.trainer, self.rate = trainer, rate

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
        for router, load in zip(routers, self.trainer.helix.expert_loads(), strict=True):
            router.e_score_correction_bias.add_((load.mean() - load).sign(), alpha=self.rate)


def main() -> None:
    parser = HfArgumentParser((BalanceArguments, TrainingArguments))
    parser.set_defaults(**{**DEFAULTS, "output_dir": "runs/balance", "max_steps": 60, "logging_steps": 5})
    recipe, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    documents = read_documents(recipe.text, recipe.text_column)
    model: Any = recipe.model_name_or_path
    if model:
        tokenizer = AutoTokenizer.from_pretrained(model)
    else:
        config = tiny()
        with args.main_process_first(local=False):  # one writes for all machines
            tokenizer = make_tokenizer(documents, config.vocab_size, Path(args.output_dir, "tokenizer"))
        check_sizes(config, len(tokenizer), recipe.sequence_length)
        model = make_model(config, tokenizer)
    training, held_out = split(pack(documents, tokenizer, recipe.sequence_length))

    trainer = HelixTrainer(
        model=model,
        args=args,
        train_dataset=training,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    if recipe.rate:
        trainer.add_callback(BalanceExperts(trainer, recipe.rate))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        name = "helix/expert_imbalance"
        found = [entry[name] for entry in trainer.state.log_history if name in entry]
        print(f"\nloss on held-out text: {metrics['eval_loss']:.3f}")
        print(f"busiest expert, in parts of the mean load: {found[0]:.2f} at first, {found[-1]:.2f} at last")
        print(f"plan {trainer.plan.rule}; checkpoint: {args.output_dir}")


def tiny() -> DeepseekV3Config:
    """A DeepSeek-V3 with three layers of eight experts."""
    return DeepseekV3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.1,  # routers that prefer some experts
    )


if __name__ == "__main__":
    main()
