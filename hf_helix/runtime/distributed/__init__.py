"""Ranks: process groups, the mesh, the pipeline, decisions that all ranks share.

environment   variables for connections, set before torch is imported
groups        backends, process groups and communicators
mesh          the axes and groups of a layout
pipe          the P2P links of a pipeline
host          the cores that a process may use
endings       messages at the end of a run after an error
agreement     checks and decisions over all ranks
contents      numbers of batches and arguments, which ranks compare
random_state  the generators of a process, and their state on other ranks
"""
