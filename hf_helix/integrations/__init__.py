"""Integrations: the Trainer of Transformers, and Accelerate.

Imports go from trainer/ to accelerate/ (launcher, checks, loop, plugin), never back.
"""
