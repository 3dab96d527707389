"""Families of decoders: the base class, derivation from the model's own code, towers."""
