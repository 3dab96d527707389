"""Tuning: measures this machine, makes plans from the measurement, and keeps the fastest, before a step.

tuner        when a run is tuned, and one tuning: measure operators, make plans, time the best of them, keep the fastest
candidates   runners with the plans of several rules, the same on every rank; the plan in use beside others
effort       how thorough a tuning the rest of a run is worth
verdict      the result of a tuning, and its sentence
cache        results on disk, for the next run of the same case; the fingerprint of a case
even_link    the speed at which an emulated link takes as long as computation
"""
