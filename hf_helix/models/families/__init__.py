"""Declared model families, to read first: dense (Llama), learned positions (GPT-2), experts (Phi-MoE)."""
