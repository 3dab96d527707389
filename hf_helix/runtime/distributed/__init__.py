"""Ranks: process groups, the mesh, the pipeline, decisions that all ranks share.

groups        backends, process groups and communicators
mesh          the axes and groups of a layout
pipe          the P2P links of a pipeline
agreement     checks and decisions over all ranks
contents      numbers of batches and arguments, which ranks compare
random_state  the generators of a process, and their state on other ranks
"""
