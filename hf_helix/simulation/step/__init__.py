"""A whole optimizer step: how long its window is, and what is added before and behind it.

steady      what a plan makes of layers that repeat themselves
whole       a window that is ordered and predicted operator by operator
window      how long a window is, from what the stages of a pipeline cost
sums        how long sums of gradients last after backward
gathers     what gathers of kept weights take, and how long the first forward pass waits
step        time, throughput and memory of the step
"""
