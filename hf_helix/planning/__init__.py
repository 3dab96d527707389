"""Graphs, plans, placements and schedules as plain data. Imports the standard library only; runs without torch.

Each folder imports the folders above it in this list:

graph/     the operators of a unit; backward derived from forward
schedule/  which micro-batch meets which stage, as data
window/    one window as numbers, and its passes
timing/    profiles, clusters, the operator clock
plan/      orders of issue, programs, predictions
choice/    the search of a schedule
rules/     the named ways to make a plan

parameters  parameters as rows: cuts, owners, shards; the part of a rank
traffic     gradients and weights that travel together, once a window
annealing   simulated annealing, for plans and schedules
collection  helpers for sequences
text        the text of differences
"""
