"""A decoder of Transformers as a traced graph: `torch.export`, opaque calls, arguments of layers."""
