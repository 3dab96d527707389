"""Small real models and data, the same wherever they are made."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

VOCABULARY = 131  # divides by nothing


def llama(**changes: Any) -> LlamaForCausalLM:
    """A tiny Llama in fp32 whose sizes do not divide evenly where they need not."""
    attention = changes.pop("attn_implementation", "sdpa")
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 57,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "attn_implementation": attention,
        **changes,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**options))
    with torch.no_grad():  # biases and norms start as constants, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return model


def sequences(
    count: int, *, lengths: tuple[int, ...] = (17,), padding: str = "", documents: tuple[int, ...] = (), seed: int = 1
) -> list[dict[str, Any]]:
    """Random token sequences with labels.

    `padding` ("left" or "right") fills shorter ones up to the longest; `documents` are lengths of several documents
    in a row, with position ids that restart.
    """
    generator = torch.Generator().manual_seed(seed)
    longest, rows = max(lengths), []
    for index in range(count):
        length = lengths[index % len(lengths)]
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[torch.rand(length, generator=generator) < 0.1] = -100
        row = {"input_ids": ids, "labels": labels}
        if padding:
            row["attention_mask"] = torch.ones(length, dtype=torch.long)
            fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
            sides = (longest - length, 0) if padding == "left" else (0, longest - length)
            row = {name: torch.nn.functional.pad(value, sides, value=fill[name]) for name, value in row.items()}
        if documents:
            row["position_ids"] = torch.cat([torch.arange(n) for n in documents])
        rows.append(row)
    return rows


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    """Training arguments for a short quiet run on CPU."""
    options = {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "seed": 3,
        **changes,
    }
    return TrainingArguments(**options)
