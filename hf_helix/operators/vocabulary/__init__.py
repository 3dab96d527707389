"""The vocabulary, cut by rows: lookup, loss, log-probabilities, and the tensor that is whole logits to a loss."""
