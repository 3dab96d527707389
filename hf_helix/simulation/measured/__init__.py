"""Measurements of the machine that this runs on, for a cluster file. All ranks measure at the same time, as they train.

stopwatch   what a piece of work takes, on the slowest rank
device      products, attention, memory and calls of a device
links       collectives by size, and the latency and bandwidth that they fit
together    what computation and communication cost each other
machine     all of it, as a cluster file holds it
"""
