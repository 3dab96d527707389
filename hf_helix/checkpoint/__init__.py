"""Checkpoints: Hugging Face checkpoints of cut models, and what a run needs to go on.

How a model is saved: `layout` (which tensor lies in which file), `safetensors_file` (the bytes of one file), `save`
(which rank writes what), `draft` (temporary files). How it is loaded: `reader` (tensors of a folder), `load`.
"""
