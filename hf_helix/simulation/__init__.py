"""The questions of training without the machine: what a layout computes, how long it takes, what it needs.

cluster     what devices compute and links carry, from a YAML file                           (no torch)
clusters/   files of known clusters
amounts/    what a rank computes, moves and keeps: counted on the meta device
sizes       the parallel sizes of a layout                                                   (no torch)
estimate    amounts and a cluster -> a profile
peaks       what is alive in a window when most is
held        until when communication holds the memory that it works with                     (no torch)
memory      what a rank holds, by part
step/       a whole optimizer step: time, throughput, memory
fsdp        a whole step of plain FSDP, as the stock Trainer runs it
layouts     every layout that can be built and fits, by its predicted speed
processes   the same work on several pieces, in a few processes                              (no torch)
"""
