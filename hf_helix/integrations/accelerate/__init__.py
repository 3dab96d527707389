"""Accelerate: the plugin, the training loop of a script, and the options of the launcher.

Import order: layout -> launcher, checks -> loop -> plugin.
"""
