"""The description of a cluster, and the measurements for it.

cluster     what devices compute and links carry, from a YAML file                           (no torch)
clusters/   files of known clusters
amounts/    what a rank computes, moves and keeps: counted on the meta device
sizes       the parallel sizes of a layout                                                   (no torch)
processes   the same work on several pieces, in a few processes                              (no torch)
"""
