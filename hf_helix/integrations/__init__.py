"""Integrations: the Trainer of Transformers, and Accelerate.

Imports go one way: trainer/ imports accelerate/ (launcher, checks, loop, plugin), which imports nothing of trainer/.
"""
