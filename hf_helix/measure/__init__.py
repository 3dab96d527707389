"""Measurements of this machine.

operators      every operator of a model, alone and beside others: a `Profile`
communication  gradient reductions, weight gathers and pipeline transfers of a window
overlap        a window under several plans, its computation alone, its communication alone
memory         the most bytes that a window has alive
timing         clocks: when parts of a program run, a GPU held until the host has issued the program
machine        what a machine is recognised by
device         rates of a device, for a cluster file
links          rates of the links between ranks and what ranks wait for each other, for a cluster file
cluster_file   the whole measurement of a cluster file
progress       progress of long measurements, as callbacks
"""
