"""Measurements of this machine.

operators      every operator of a window, alone and concurrently: a `Profile`
overlap        windows under several plans, their computation only, their communication only
memory         the peak memory of a window
timing         spans and seconds on the streams of a rank; the stopwatch
machine        the identity of a machine
device         rates of a device, for a cluster file
cluster_file   the content of a cluster file: rates of links, slowdowns, and skew at collectives
cache_folder   the folder of results on disk, and files that are complete or not there
progress       progress of long measurements, as callbacks
"""
