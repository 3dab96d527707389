"""The names of Transformers that hf_helix uses.

In:   nothing.
Out:  rows, see `used`.
Must hold: as `used`.
"""

from __future__ import annotations

import itertools

from support.used_names.rows import NO_IMPORT, NO_REFUSAL, NO_STEP, Used, used

_TRAINER = "transformers.trainer:Trainer"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_CONFIG = "transformers.configuration_utils:PreTrainedConfig"
_NO_LOADING = "no checkpoint can be loaded or saved"
_NO_FAMILY = "models of this family are an error"

TRANSFORMERS: tuple[Used, ...] = tuple(
    itertools.chain(
        used(
            _TRAINER,
            "_prepare_inputs",
            "moves a batch to the device",
            NO_STEP,
            takes="self, inputs",
        ),
        used(
            _TRAINER,
            "_get_num_items_in_batch",
            "counts the tokens of an evaluation batch",
            "evaluation is an error",
            takes="self, batch_samples, device",
        ),
        used(
            _TRAINER,
            "compute_loss compute_loss_context_manager autocast_smart_context_manager _wrap_model "
            "_prepare_context_parallel_inputs",
            "refuses an override of it, which would have no effect",
            NO_REFUSAL,
        ),
        used(
            _TRAINER,
            "gather_function",
            "a property of ours takes its place, which counts each sample once",
            "metrics would count samples several times",
            within=f"{_TRAINER}.create_accelerator_and_postprocess",
        ),
        used(
            _TRAINER,
            "current_gradient_accumulation_steps",
            "scales the loss of a micro-batch that has no number of tokens",
            "the mean of a window would be the sum of its micro-batches",
            within=f"{_TRAINER}._run_epoch",
        ),
        used(
            "transformers.trainer",
            "SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME",
            "names files of a checkpoint as the stock Trainer does",
            NO_IMPORT,
        ),
        used(
            "transformers.trainer_utils",
            "rotate_checkpoints",
            "deletes the oldest checkpoints once the new one has its place",
            NO_IMPORT,
            takes="output_dir, save_total_limit, best_model_checkpoint, use_mtime=",
        ),
        used("transformers.trainer_jit_checkpoint", "JITCheckpointCallback", "tells ranks of SIGTERM", NO_IMPORT),
        used("transformers.trainer_utils", "SaveStrategy", "tells whether checkpoints are saved", NO_IMPORT),
        used(
            "transformers.trainer_utils", "HPSearchBackend", "refuses backends that rank 0 would run alone", NO_IMPORT
        ),
        used(
            "transformers.trainer_pt_utils", "LabelSmoother", "refuses a label smoother that is set by hand", NO_IMPORT
        ),
        used(
            "transformers.conversion_mapping",
            "get_model_conversion_mapping",
            "tells which tensors of a checkpoint become which parameters",
            _NO_LOADING,
            takes="model",
        ),
        used(
            "transformers.core_model_loading",
            "Concatenate MergeModulelist WeightConverter WeightRenaming dot_natural_key",
            "converts tensors of a checkpoint, such as those of experts, as `from_pretrained` does",
            _NO_LOADING,
        ),
        used(
            "transformers.core_model_loading",
            "rename_source_key",
            "finds the parameter that a tensor of a checkpoint belongs to",
            _NO_LOADING,
            takes="source_key, weight_renamings, weight_converters, prefix, meta_state_dict",
        ),
        used(
            "transformers.core_model_loading",
            "revert_weight_conversion",
            "names tensors on disk as `save_pretrained` does",
            _NO_LOADING,
            takes="model, state_dict",
        ),
        used(
            "transformers.modeling_utils",
            "remove_tied_weights_from_state_dict",
            "leaves out weights that are tied, as `save_pretrained` does",
            _NO_LOADING,
            takes="state_dict, model",
        ),
        used(
            _MODEL,
            "_adjust_missing_and_unexpected_keys",
            "tells which tensors of a checkpoint nobody needs",
            _NO_LOADING,
            takes="self, loading_info",
        ),
        used(
            _MODEL,
            "_init_weights",
            "draws random weights, and fills buffers of a model on the meta device",
            "no model can start on the meta device",
            takes="self, module",
        ),
        used(_MODEL, "_keys_to_ignore_on_save", "leaves tensors out of a checkpoint", "saving is an error"),
        used(
            _MODEL,
            "_loss_function",
            "refuses a loss of the user's own",
            NO_REFUSAL,
            within=f"{_MODEL}.loss_function",
        ),
        used(
            "transformers.modeling_utils",
            "ALL_ATTENTION_FUNCTIONS",
            "finds the attention function that a model asks for",
            NO_IMPORT,
        ),
        used(
            _CONFIG,
            "_attn_implementation",
            "reads which attention a model asks for",
            "models cannot be cut",
            within=f"{_CONFIG}.__post_init__",
        ),
        used(
            _CONFIG,
            "_experts_implementation",
            "has the form of a module of experts proven by the module's own forward",
            _NO_FAMILY,
            within=f"{_CONFIG}.__post_init__",
        ),
        used(
            _CONFIG,
            "_name_or_path",
            "reads the base model for the model card",
            "the card would not name the base model",
            within=f"{_CONFIG}.__post_init__",
        ),
        used(
            _MODEL,
            "_gradient_checkpointing_func",
            "refuses a checkpoint function of the user's own",
            NO_REFUSAL,
            within=f"{_MODEL}._set_gradient_checkpointing",
        ),
        used(
            "transformers.masking_utils",
            "create_causal_mask create_sliding_window_causal_mask",
            "makes the masks that a model's own forward would make",
            NO_IMPORT,
        ),
        used(
            "transformers.loss.loss_utils",
            "LOSS_MAPPING ForCausalLMLoss",
            "compares a model's loss with the one that is computed",
            NO_IMPORT,
        ),
        used(
            "transformers.models.auto.modeling_auto",
            "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
            "lists the causal-LM classes, for the census and for what is refused",
            NO_IMPORT,
        ),
        used(
            "transformers.models.gpt2.modeling_gpt2:GPT2Attention",
            "_upcast_and_reordered_attn",
            "computes GPT-2's attention with `reorder_and_upcast_attn`",
            _NO_FAMILY,
            takes="self, query, key, value, attention_mask",
        ),
        *(
            used(f"transformers.models.{home}", "eager_attention_forward", "is the model's eager attention", NO_IMPORT)
            for home in (
                "gpt2.modeling_gpt2",
                "gpt_neox.modeling_gpt_neox",
                "llama.modeling_llama",
            )
        ),
        *(
            used(f"transformers.models.{home}", "apply_rotary_pos_emb", "rotates queries and keys", NO_IMPORT)
            for home in ("gpt_neox.modeling_gpt_neox", "llama.modeling_llama")
        ),
        *(
            used(
                f"transformers.models.{home}Experts",
                "_apply_gate",
                "is the activation between the two products of an expert",
                _NO_FAMILY,
                takes="self, gate_up_out",
            )
            for home in (
                "mixtral.modeling_mixtral:Mixtral",
                "phimoe.modeling_phimoe:Phimoe",
                "qwen3_moe.modeling_qwen3_moe:Qwen3Moe",
            )
        ),
    )
)
