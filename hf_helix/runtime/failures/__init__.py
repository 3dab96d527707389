"""The end of a run after an error: every rank ends soon, with one message.

heartbeat      liveness of the ranks
bounded_store  requests that end, also without the host of the store
values         checks of ids, labels, positions, losses and gradients
restarts       rendezvous after a restart by torchrun
"""
