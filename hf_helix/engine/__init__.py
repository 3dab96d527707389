"""The cut model on a rank."""
