"""Accelerate: the plugin, the training loop of a script, and the options of the launcher.

Import order: foreign_sizes -> launcher, checks -> accelerator -> loop -> plugin.
"""
