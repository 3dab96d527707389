"""The end of a run after an error: every rank ends soon, with one message.

heartbeat      liveness of the ranks
progress       ranks that live, and do not come to a meeting
activity       the activities of the main thread, their times, the place of a rank
bounded_store  requests that end, also without the host of the store
values         checks of ids, labels, positions, losses and gradients
exchange       objects of all ranks through the store, for a thread
preemption     the end of a window between micro-batches, after a request to any rank
restarts       rendezvous after a restart by torchrun
"""
