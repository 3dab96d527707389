"""The cut model on a rank.

engine            trains windows, evaluates, clips, saves: what the Trainer and the loop call
build             cuts a whole model and makes its runner
diagnostics       what can be measured of it: the figures of the logs, overlap, comparisons, memory, traces
microbatches      from batches to what a runner takes
checks            what cannot be run, refused by name
recompute         which layers are recomputed
evaluate          what evaluation does before and after the runner
snapshot          what a script may not change once the model is cut
zero              ZeRO: an optimizer that steps shards, and full weights in the model for a while
advice            what the doctor found, for a run to say at its start
synthetic         a model with random weights and tokens, for measuring without training
proof/            a cut model compared with the unsplit one, before anyone trains with it
"""
