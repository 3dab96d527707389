"""The Trainer of Transformers, and of TRL, on a cut model."""
