"""Checkpoints: Hugging Face checkpoints of cut models, and the training state of a run.

Saving: `files` (tensors in files, bytes of a file, temporary files until publication), `save` (the writing ranks),
`background` (copies that a thread writes).
Loading: `reader` (tensors of a folder), `load` (this rank's slices, from a folder or at random).
Safety: `claims` (marks and locks of the writing process), `plain_files` (allow-lists), `whole` (damage and its remedy).
"""
