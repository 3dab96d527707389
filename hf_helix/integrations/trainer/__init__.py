"""The Trainer of Transformers, and TRL's SFTTrainer, on a cut model.

Imports go one way: stock -> trl -> overrides -> checks -> the parts of the mixin (evaluation -> training_step,
checkpoints, hyperparameter_search, model_card) -> trainer.
"""
