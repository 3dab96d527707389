"""The work and the memory of a rank, counted on the meta device.

records     the amounts as plain data, without torch
kept        counts and answers on disk, without torch
meter       counts kernels, transfers and live bytes of operators on the meta device
amounts     kernels, bytes sent and live memory of every operator of a rank, on a mesh that sends nothing
coarse      the computations between two communications as one operator, without torch
larger      at most the work of larger micro-batches, without counting
lifetimes   lifetimes of the memory that operators leave allocated
"""
