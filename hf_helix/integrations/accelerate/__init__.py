"""Accelerate: the plugin, a training loop of one's own, and the options of the launcher.

Imports go one way: launcher, checks -> loop -> plugin.
"""
