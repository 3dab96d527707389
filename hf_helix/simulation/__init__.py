"""The questions of training without the machine: what a layout computes, how long it takes, what it needs.

kernels     the words in which amounts are counted                                          (no torch)
meter       counts kernels and live bytes of what runs on the meta device
mesh        one rank of a layout, whose axes send nothing
amounts     what every operator of a rank computes, moves and keeps
processes   the same work on several pieces, in a few processes                            (no torch)
cluster     what devices compute and links carry, from a YAML file                           (no torch)
section     a mapping of that file, whose keys are taken one by one                          (no torch)
sizes       the parallel sizes of a layout                                                   (no torch)
estimate    amounts and a cluster -> a profile
lifetimes   how long memory lives that an operator leaves
peaks       what is alive in a window when most is
memory      what a rank holds, by part
steady      what a plan makes of layers that repeat themselves
whole       a window that is ordered and predicted operator by operator
window      how long a window is, from what the stages of a pipeline cost
sums        how long sums of gradients last after backward
kept        weights that ranks keep whole and each step a part of: which lie in one piece      (no torch)
gathers     what gathers of such weights take, and how long the first forward pass waits
step        a whole optimizer step: time, throughput, memory
fsdp        a whole step of plain FSDP, as the stock Trainer runs it
layouts     every layout that can be built and fits, by its predicted speed
clusters/   files of known clusters
measured/   this machine, for such a file
"""
