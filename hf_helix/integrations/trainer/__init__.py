"""The Trainer of Transformers, and TRL's SFTTrainer, on a cut model.

Import order: stock -> trl, trackers -> checks -> the parts of the mixin (evaluation -> training_step, decisions ->
checkpoints, hyperparameter_search, model_card) -> trainer.
"""
