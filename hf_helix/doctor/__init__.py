"""The doctor: the fastest layout of a model that fits a cluster, simulated without a measurement.

case          a layout with its micro-batches and options
simulated     the layouts of a model on simulated ranks: the amounts of a rank, counted once
counting      counts a model on the meta device
amounts/      the amounts of operators, counted on the meta device
estimate      amounts and a cluster -> a profile
traffic       gradient reductions and gathers of weights, and their times
edges         what a rank waits for before and after its work in a window
window        the seconds of a window, whole or, for a search, with few layers of one rank
memory        the memory of a rank, by part: of weights, of states, and the peak of a window
step          an optimizer step: time, throughput, memory
exactness     the error of predictions of published runs, by kind
rivals        a step under other ways to train: FSDP, HSDP, ZeRO-2, with the host
layouts       the search of layouts
processes     simulations in several processes
report        steps and rankings as text
page          the same as a page for a browser, with the memory of a window over time

Only `counting`, the counts in `amounts/` and `page` import torch.
"""
