"""What an operator does to tensors: forward, input gradient, weight gradient; and the units they form."""
