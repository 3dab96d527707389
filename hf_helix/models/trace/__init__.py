"""A decoder of Transformers as a traced graph: `torch.export`, calls at which it stops, masks and rope it is given."""
