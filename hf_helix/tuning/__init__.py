"""Tuning: measures this machine, makes plans from the measurement, and keeps the fastest, before a step.

tuner        which plan a run uses, and when that is decided
autotune     one tuning: measure operators, make plans, time the best of them, keep the fastest
candidates   runners with the plans of several rules, the same on every rank
effort       how thorough a tuning the rest of a run is worth
result       what a tuning found; `verdict` puts it into words
cache        results on disk, for the next run of the same case; `fingerprint` says what a case is
compare      the plan in use beside others, when a user asks
progress     what is shown meanwhile
measure/     the measurements themselves
"""
