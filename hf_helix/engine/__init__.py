"""The cut model on a rank.

engine            cuts a model; the objects below, for the Trainer and a loop
cut_model         the cut model, as the other files read it
window_checks     what ranks compare, and what is refused, before windows
session           windows, tuning, evaluation
weights           norms, clipping, full tensors, the optimizer's shards, checkpoints
diagnostics       measurements: the figures of the logs, overlap, comparisons, memory, traces
routers           the counts of routers, for the logs and for scripts
calls             calls of the model by a script, with arguments of each rank's own
call_state        the state that such a call reads besides its arguments: adapters, modes, buffers
mixed_types       parameters of several types, such as norms in fp32 in a model in bf16
optimizer_shards  ZeRO: an optimizer that steps shards, and full weights in the model for a while
matrix_steps      an optimizer that steps whole matrices, each on one rank
verification      silent corruption: the gradients of a window computed twice
advice            the findings of the doctor, for the start of a run
synthetic         a model with random weights and tokens, for measuring without training
cut/              the model cut into operators, its micro-batches and calls
proof/            a cut model compared with the unsplit one, before anyone trains with it
"""
