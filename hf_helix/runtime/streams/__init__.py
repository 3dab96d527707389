"""Streams: ordered queues of work with events, on every device, and the trace of a window."""
