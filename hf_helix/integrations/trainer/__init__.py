"""The Trainer of Transformers, and TRL's SFTTrainer, on a cut model.

Import order: stock -> trl, trackers -> checks -> the parts of the mixin (preemption, evaluation -> training_step,
saving, decisions -> checkpoints, hyperparameter_search, model_card) -> trainer.
"""
