"""Checkpoints: Hugging Face checkpoints of cut models, and what a run needs to go on."""
