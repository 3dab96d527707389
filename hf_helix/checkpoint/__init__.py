"""Checkpoints: Hugging Face checkpoints of cut models, and what a run needs to go on.

How a model is saved: `files` (which tensor lies in which file, the bytes of one file), `save` (which rank writes what),
`folders` (temporary folders that take the place of earlier ones). How it is loaded: `reader` (tensors of a folder),
`load`.
"""
