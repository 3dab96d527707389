"""Slow ranks: which rank the others wait for, and why.

looks     traced windows that all ranks compare
times     the times of a rank in a look
pauses    pauses of the host, garbage collections
verdict   from the times of all ranks to a rank and a cause
"""
