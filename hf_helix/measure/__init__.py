"""Measurements on this machine.

profiler        every operator of a model, alone and beside others: a `Profile`
bench           one operator, or two beside each other, again and again
transfer_times  what ranks of a pipeline send each other
sum_times       sums of gradients over ranks
gather_times    gathers of weights that a window has once
shares          bytes that data-parallel ranks sum and gather, and what parts save each of them
timing          what runs of a program, and when; holds a GPU until the host has issued it
overlap         a window under each of several plans, its computation alone, its communication alone
memory          the most bytes that a window has alive
even_link       the speed at which an emulated link takes as long as computation
machine         what a machine is recognised by
"""
