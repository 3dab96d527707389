"""The cut model on a rank.

engine            trains windows, evaluates, clips, saves: the engine of the Trainer and of a loop
build             cuts a model and makes its runner
diagnostics       measurements of the cut model: the figures of the logs, overlap, comparisons, memory, traces
called_decoder    calls of the cut decoder by code above it: losses of one's own
calls             calls of the model by a script, with arguments of each rank's own
microbatches      from batches to the micro-batches of a runner
mixed_types       parameters of several types, such as norms in fp32 in a model in bf16
checks            refusals of models, declarations and batches, by name
float8            the linears that multiply in fp8
recompute         the recomputed layers
evaluate          evaluation before and after the runner
snapshot          the parts of a cut model that a script may not change
optimizer_shards  ZeRO: an optimizer that steps shards, and full weights in the model for a while
advice            the findings of the doctor, for the start of a run
synthetic         a model with random weights and tokens, for measuring without training
proof/            a cut model compared with the unsplit one, before anyone trains with it
"""
