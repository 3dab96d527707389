"""Every private or unstable name of another package that hf_helix calls, reads or sets: test_upstream.py compares the
tables with what is installed, so that a change is found before users meet it.
"""

from __future__ import annotations

import inspect
from typing import Any

from hf_helix.integrations.upstream import mentions, resolve

OWNED: dict[str, str] = {
    "transformers.trainer:Trainer": "_prepare_inputs _get_num_items_in_batch compute_loss compute_loss_context_manager "
    "autocast_smart_context_manager _wrap_model _prepare_context_parallel_inputs",
    "transformers.trainer": "SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME",
    "transformers.trainer_utils": "rotate_checkpoints SaveStrategy HPSearchBackend",
    "transformers.trainer_jit_checkpoint": "JITCheckpointCallback",
    "transformers.trainer_pt_utils": "LabelSmoother",
    "transformers.conversion_mapping": "get_model_conversion_mapping",
    "transformers.core_model_loading": "Concatenate MergeModulelist WeightConverter WeightRenaming dot_natural_key "
    "rename_source_key revert_weight_conversion",
    "transformers.modeling_utils": "remove_tied_weights_from_state_dict ALL_ATTENTION_FUNCTIONS",
    "transformers.modeling_utils:PreTrainedModel": "_adjust_missing_and_unexpected_keys _init_weights "
    "_keys_to_ignore_on_save",
    "transformers.masking_utils": "create_causal_mask create_sliding_window_causal_mask",
    "transformers.loss.loss_utils": "LOSS_MAPPING ForCausalLMLoss",
    "transformers.models.auto.modeling_auto": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "transformers.models.gpt2.modeling_gpt2:GPT2Attention": "_upcast_and_reordered_attn",
    "transformers.models.gpt2.modeling_gpt2": "eager_attention_forward",
    "transformers.models.gpt_neox.modeling_gpt_neox": "eager_attention_forward apply_rotary_pos_emb",
    "transformers.models.llama.modeling_llama": "eager_attention_forward apply_rotary_pos_emb",
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts": "_apply_gate",
    "transformers.models.phimoe.modeling_phimoe:PhimoeExperts": "_apply_gate",
    "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts": "_apply_gate",
    "accelerate.accelerator:Accelerator": "backward accumulate unwrap_model save_model get_state_dict save_state "
    "load_state clip_grad_norm_ gather_for_metrics",
    "accelerate.state:AcceleratorState": "_shared_state",
    "flash_attn.flash_attn_interface": "_flash_attn_forward _flash_attn_backward",
    "peft.tuners.lora": "LoraLayer Linear Embedding",
    "peft.tuners.tuners_utils": "BaseTunerLayer",
    "peft.utils.other": "ModulesToSaveWrapper AuxiliaryTrainingWrapper",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.utils": "_ChunkedLogProbFunction",
    "transformers.utils.generic": "ModelOutput",
    "accelerate.utils.modeling": "get_mixed_precision_context_manager",
    "torch": "_foreach_norm _has_compatible_shallow_copy_type _foreach_copy_ _foreach_div_",
    "torch.cuda": "_sleep",
    "torch.distributed.rendezvous": "_rendezvous_handlers",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "torch.distributed._checkpointable:_Checkpointable": "__create_chunk_list__ __create_write_items__ "
    "__get_tensor_shard__",
    "torch.multiprocessing.reductions": "StorageWeakRef",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils._pytree": "tree_leaves tree_map tree_flatten tree_unflatten TreeSpec",
    "torch:Tensor": "_make_wrapper_subclass _version _is_view _backward_hooks _post_accumulate_grad_hooks",
    "torch:UntypedStorage": "_cdata",
    "torch.autograd:Variable": "_execution_engine",
    "torch.nn.modules.module:Module": "_compiled_call_impl",
    "torch:ops.aten": "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward _flash_attention_forward "
    "_flash_attention_backward _softmax _to_copy _unsafe_view _fused_rms_norm _fused_rms_norm_backward _log_softmax "
    "_grouped_mm",
    "torch:ops.aten.mm.default": "_schema",
}
"""Names by the module or `module:Class` that has them."""

MENTIONED: dict[str, str] = {
    "transformers.trainer:Trainer.create_accelerator_and_postprocess": "gather_function",
    "transformers.trainer:Trainer._run_epoch": "current_gradient_accumulation_steps",
    "transformers.modeling_utils:PreTrainedModel.loss_function": "_loss_function",
    "transformers.modeling_utils:PreTrainedModel._set_gradient_checkpointing": "_gradient_checkpointing_func",
    "transformers.configuration_utils:PreTrainedConfig.__post_init__": "_attn_implementation _experts_implementation "
    "_name_or_path",
    "accelerate.accelerator:Accelerator.prepare_model": "_is_accelerate_prepared",
    "accelerate.accelerator:Accelerator.__init__": "_schedulers",
    "accelerate.hooks:add_hook_to_module": "_hf_hook",
    "peft.tuners.lora:LoraLayer.__init__": "lora_A lora_B lora_embedding_A lora_embedding_B lora_dropout scaling "
    "lora_variant merged_adapters",
    "peft.utils.other:ModulesToSaveWrapper.init_modules": "modules_to_save",
    "peft.utils.other:AuxiliaryTrainingWrapper.__init__": "original_module",
    "torch.nn.modules.module:Module.__delattr__": "_parameters _buffers _non_persistent_buffers_set",
    "torch.nn.modules.module:Module._call_impl": "_forward_pre_hooks _forward_hooks _backward_pre_hooks "
    "_backward_hooks",
    "torch._dynamo.eval_frame:OptimizedModule.__init__": "_orig_mod",
    "torch.optim.lr_scheduler:LRScheduler.step": "_step_count",
}
"""Attributes that instances have, and their class does not, by a function that sets or reads them."""

TAKES: dict[str, str] = {
    "transformers.trainer:Trainer._prepare_inputs": "self, inputs",
    "transformers.trainer:Trainer._get_num_items_in_batch": "self, batch_samples, device",
    "transformers.trainer_utils:rotate_checkpoints": "output_dir, save_total_limit, best_model_checkpoint, use_mtime=",
    "transformers.conversion_mapping:get_model_conversion_mapping": "model",
    "transformers.core_model_loading:rename_source_key": "source_key, weight_renamings, weight_converters, prefix, "
    "meta_state_dict",
    "transformers.core_model_loading:revert_weight_conversion": "model, state_dict",
    "transformers.modeling_utils:remove_tied_weights_from_state_dict": "state_dict, model",
    "transformers.modeling_utils:PreTrainedModel._adjust_missing_and_unexpected_keys": "self, loading_info",
    "transformers.modeling_utils:PreTrainedModel._init_weights": "self, module",
    "transformers.models.gpt2.modeling_gpt2:GPT2Attention._upcast_and_reordered_attn": "self, query, key, value, "
    "attention_mask",
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts._apply_gate": "self, gate_up_out",
    "transformers.models.phimoe.modeling_phimoe:PhimoeExperts._apply_gate": "self, gate_up_out",
    "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts._apply_gate": "self, gate_up_out",
    "accelerate.accelerator:Accelerator.clip_grad_norm_": "self, parameters, max_norm, norm_type=",
    "accelerate.accelerator:Accelerator.gather_for_metrics": "self, input_data, use_gather_object=",
}
"""What functions are called with: parameters given by place, then `name=` for those given by name."""

USED = {
    f"{owner}{'.' if ':' in owner else ':'}{name}": name for owner, names in OWNED.items() for name in names.split()
}
USED |= {f"{function} {name}": name for function, names in MENTIONED.items() for name in names.split()}


def problem_of_use(row: str) -> str:
    """What is wrong with a row of `USED`; empty where it is as it was."""
    place, _, attribute = row.partition(" ")
    try:
        value = resolve(place)
    except (ImportError, AttributeError):
        return f"{place} is gone"
    if attribute:
        return "" if attribute in mentions(value) else f"{place} knows no {attribute} any more"
    error = _misfit(value, TAKES[place]) if place in TAKES else None
    return f"{place} cannot be called with ({TAKES[place]}) any more, {error}" if error else ""


def _misfit(function: Any, takes: str) -> TypeError | None:
    names = takes.split(", ")
    keywords = {name[:-1]: None for name in names if name.endswith("=")}
    try:
        inspect.signature(function).bind(*[None] * (len(names) - len(keywords)), **keywords)
    except TypeError as error:
        return error
    return None
