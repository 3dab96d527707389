"""Proof: a cut model is compared with the unsplit Transformers model, before training.

prove         the comparison: a small model of the class, under several plans and kinds of batches
coverage      the parts of a model that its small model lacks
reference     the unsplit model; weights and batches that reveal mistakes
verdict       differences, their bars, and a `Proof`
first_use     the proof of a derived family before a first run
"""
