"""Proof: a cut model is compared with the unsplit Transformers model, before anyone trains with it."""
