"""Tuning: plans from the measured times of this machine, of which the fastest is kept; always between steps.

tuner          the choice of the plan of a run: measure operators, make plans, time the best of them, keep the fastest
candidates     runners with the plans of several rules; comparisons of plans; the rate of an emulated link
budget         the tier of tuning that the rest of a run is worth
result_text    the result of a tuning: its sentence, tables of plans, the scorecard of a plan
found_layouts  the speeds of layouts on disk, found by the doctor
cache          results on disk, for the next run of the same case; the fingerprint of a case
"""
