"""The doors: the Trainer of Transformers, and Accelerate."""
