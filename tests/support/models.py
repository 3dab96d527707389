"""Small real models and data, the same wherever they are made."""

import pkgutil
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    TrainingArguments,
)

from hf_helix.models.registry import REGISTERED

VOCABULARY = 131  # divides by nothing
EVEN = {"intermediate_size": 40}  # the grouped GEMMs of torch need rows of 16 bytes
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # a Llama of five layers, for a pipeline whose ranks have different numbers
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def own_models() -> list[str]:
    """The classes that the package declares, whatever tests have registered in this process."""
    return sorted(name for name, family in REGISTERED.items() if type(family).__module__.startswith("hf_helix."))


def tiny(family: str = "llama", dtype: str = "float32", lora: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The tiny model of a family, as if loaded in a type: buffers stay as they are; with adapters as in `adapted`.

    Args:
        family: one of `FAMILIES`, or a function that makes the model, "module:function".
    """
    make = FAMILIES.get(family) or pkgutil.resolve_name(family)
    model = make(**changes)
    for parameter in model.parameters():
        if not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return model if lora is None else adapted(model, **lora)


def adapted(model: PreTrainedModel, idle: str = "", **options: Any) -> Any:
    """Inside a `PeftModel`, with adapters that are far from zero. `idle`: the name of a second one, switched off."""
    config = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    config |= {"init_lora_weights": False, **options}
    torch.manual_seed(5)
    result = get_peft_model(model, LoraConfig(**config))
    if idle:
        result.add_adapter(idle, LoraConfig(**{**config, "r": 2}))
    for name, weight in result.named_parameters():
        if "lora_magnitude_vector" in name:
            weight.data *= torch.empty_like(weight).uniform_(0.5, 1.5)
    return result


def llama(**changes: Any) -> LlamaForCausalLM:
    """A tiny Llama in fp32 whose sizes do not divide evenly where they need not."""
    return made(LlamaForCausalLM, LlamaConfig, changes)


def four_bit(
    of: str = "llama",
    loaded_as: str = "float32",
    quantization: dict[str, Any] | None = None,
    prepared: bool = False,
    **changes: Any,
) -> Any:
    """The tiny model of a family with its linears in 4 bits, as `from_pretrained` loads it.

    Args:
        of: one of `FAMILIES`.
        loaded_as: the type before the linears are packed.
        quantization: options of `BitsAndBytesConfig`.
        prepared: by PEFT's `prepare_model_for_kbit_training`.
    """
    model = FAMILIES[of](**{"hidden_size": 128, "intermediate_size": 256, **changes})
    packing = BitsAndBytesConfig(load_in_4bit=True, **{"bnb_4bit_quant_type": "nf4", **(quantization or {})})
    given = {"config": model.config, "state_dict": model.state_dict(), "dtype": getattr(torch, loaded_as)}
    model = type(model).from_pretrained(None, **given, quantization_config=packing)
    return prepare_model_for_kbit_training(model) if prepared else model


def mistral(**changes: Any) -> MistralForCausalLM:
    """With a window on every layer."""
    return made(MistralForCausalLM, MistralConfig, {"sliding_window": 7, **changes})


def qwen2(**changes: Any) -> Qwen2ForCausalLM:
    """With a window on all layers but the first."""
    return made(Qwen2ForCausalLM, Qwen2Config, {**WINDOWS, **changes})


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    """With a window on all layers but the first, and heads that are wider together than the model."""
    return made(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12, **WINDOWS, **changes})


def starcoder2(**changes: Any) -> Starcoder2ForCausalLM:
    """No family of the package: the one that `docs/adding_a_model.md` adds."""
    options = {"sliding_window": 7, "bos_token_id": 1, "eos_token_id": 2, **changes}
    return made(Starcoder2ForCausalLM, Starcoder2Config, options)


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    """Without dropout, which the unsplit model would draw otherwise."""
    dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    return made(
        GPT2LMHeadModel, GPT2Config, {"n_inner": 57, "bos_token_id": 1, "eos_token_id": 2, **dropout, **changes}
    )


def gpt_neox(**changes: Any) -> GPTNeoXForCausalLM:
    """With parallel residuals and a rope on a part of each head."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return made(GPTNeoXForCausalLM, GPTNeoXConfig, {"rope_parameters": rope, "num_key_value_heads": 4, **changes})


def mixtral(all_to: tuple[int, ...] = (), **changes: Any) -> MixtralForCausalLM:
    """`all_to`: the experts that every token goes to, whatever the routers say."""
    model = made(MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, **EVEN, **changes})
    for layer in model.model.layers if all_to else ():

        def send(x: torch.Tensor, route: Any = layer.mlp.gate.forward) -> tuple[torch.Tensor, ...]:
            logits, weights, chosen = route(x)
            return logits, weights, torch.cat([torch.full_like(chosen[:, :1], expert) for expert in all_to], -1)

        layer.mlp.gate.forward = send
    return model


def qwen3_moe(**changes: Any) -> Qwen3MoeForCausalLM:
    """The first layer has no experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
    return made(Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 8, **experts, **changes})


def phimoe(random: bool = False, **changes: Any) -> PhimoeForCausalLM:
    """Routers choose as in evaluation unless `random`: what they draw depends on how the tokens are spread."""
    biases = {"attention_bias": True, "lm_head_bias": True}
    model = made(PhimoeForCausalLM, PhimoeConfig, {"num_local_experts": 4, **EVEN, **biases, **changes})
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.router.weight, std=0.5)  # far from ties
        if not random:
            layer.mlp.router.eval().train = lambda mode=True, router=layer.mlp.router: router
    return model


def made(model: type, config: type[PretrainedConfig], changes: dict[str, Any]) -> Any:
    """A tiny decoder in fp32."""
    changes = dict(changes)
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
    model = model(config(**options))
    with torch.no_grad():  # biases and norms start as constants, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return model


FAMILIES = {
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "starcoder2": starcoder2,
}


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


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of rows of several lengths."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
"""Training arguments of a run that writes nothing by itself."""


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    """Training arguments for a short quiet run on CPU."""
    options = {
        "output_dir": folder,
        **QUIET,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "seed": 3,
        **changes,
    }
    return TrainingArguments(**options)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Of a vocabulary of two words."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "a": 1}, "[PAD]")), pad_token="[PAD]"
    )
