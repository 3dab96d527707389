"""Checkpoints: Hugging Face checkpoints of cut models, and the training state of a run.

Saving: `files` (tensors in files, bytes of a file), `save` (the writing ranks), `folders` (temporary folders until
publication). Loading: `reader` (tensors of a folder), `load`.
"""
