"""The cut of a model: operators, micro-batches, calls and evaluation, before anyone trains.

build            cuts a model and makes its runner
called_decoder   calls of the cut decoder by code above it: losses of one's own
compared_losses  comparison of such losses between the ranks that share a batch
microbatches     from batches to the micro-batches of a runner
checks           refusals of models, declarations and batches, by name
float8           the linears that multiply in fp8
recompute        the recomputed layers
evaluate         evaluation before and after the runner
snapshot         the parts of a cut model that a script may not change
"""
