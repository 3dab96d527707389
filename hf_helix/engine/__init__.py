"""The cut model on a rank.

engine            trains windows, evaluates, clips, saves: what the Trainer and the loop call
build             cuts a whole model and makes its runner
diagnostics       what can be measured of it: the figures of the logs, overlap, comparisons, memory, traces
microbatches      from batches to what a runner takes
checks            what cannot be run, refused by name
recompute         which layers are recomputed
evaluate          what evaluation does before and after the runner
parameter_counts  how many parameters the whole model has
synthetic         a model with random weights and tokens, for measuring without training
"""
