"""The doctor: which layout of a model is fastest on a cluster, and does it fit? Nothing is measured.

simulated     the layouts of a model on simulated ranks: what a rank computes, moves and keeps
amounts/      the amounts of operators, counted on the meta device
estimate      amounts and a cluster -> a profile
reductions    gradient reductions and gathers of weights, once in a window
window        the seconds of a window, whole or at reduced fidelity
held          how long collectives keep their buffers alive                                 (no torch)
peaks         peak memory of a window
memory        the memory of a rank, by part
step          an optimizer step: time, throughput, memory
fsdp          a step of plain FSDP, as the stock Trainer runs it
layouts       the search of layouts
processes     simulations in several processes                                              (no torch)
report        steps and rankings as text
"""
