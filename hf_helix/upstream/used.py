"""Every private or unstable name of another package that hf_helix calls, reads or sets.

In:   nothing.
Out:  a table, which `check` compares with what is installed and docs/upstream.md shows.
Must hold: it has a row for every such name and no other (tests/test_upstream.py); it imports nothing. Unstable are
names with an underscore, and those of modules that the package's documentation leaves out.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Used(NamedTuple):
    """A name of another package.

    Attributes:
        name: as `module:name` or `module:class.name`.
        purpose: what hf_helix does with it.
        otherwise: what happens if it is not there any more.
        takes: what it is called with: the parameters that are given by place, then `name=` for those given by name;
            empty where this is not checked.
        within: for an attribute that instances have, and their class does not, the function that sets or reads it.
    """

    name: str
    purpose: str
    otherwise: str
    takes: str = ""
    within: str = ""

    @property
    def method(self) -> str:
        """The name without what it belongs to."""
        return self.name.replace(":", ".").rpartition(".")[2]

    @property
    def package(self) -> str:
        """The package that has it."""
        return self.name.partition(":")[0].partition(".")[0]


_NO_IMPORT = "hf_helix cannot be imported"
_NO_STEP = "the first step is an error"
_NO_LOADING = "no checkpoint can be loaded or saved"
_NO_REFUSAL = "what cannot be honoured would be ignored without a word"
_NO_FAMILY = "models of this family are an error"


def _used(owner: str, names: str, purpose: str, otherwise: str, takes: str = "", within: str = "") -> tuple[Used, ...]:
    """One row for each of several names of a module, or of a class in it."""
    join = "." if ":" in owner else ":"
    return tuple(Used(f"{owner}{join}{name}", purpose, otherwise, takes, within) for name in names.split())


_TRAINER = "transformers.trainer:Trainer"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_CONFIG = "transformers.configuration_utils:PreTrainedConfig"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
_MODULE = "torch.nn.modules.module:Module"

_TRANSFORMERS = (
    _used(
        _TRAINER,
        "_prepare_inputs",
        "moves a batch to the device",
        _NO_STEP,
        takes="self, inputs",
    ),
    _used(
        _TRAINER,
        "_get_num_items_in_batch",
        "counts the tokens of an evaluation batch",
        "evaluation is an error",
        takes="self, batch_samples, device",
    ),
    _used(
        _TRAINER,
        "compute_loss compute_loss_context_manager autocast_smart_context_manager _wrap_model "
        "_prepare_context_parallel_inputs",
        "refuses an override of it, which would have no effect",
        _NO_REFUSAL,
    ),
    _used(
        _TRAINER,
        "gather_function",
        "a property of ours takes its place, which counts each sample once",
        "metrics would count samples several times",
        within=f"{_TRAINER}.create_accelerator_and_postprocess",
    ),
    _used(
        _TRAINER,
        "current_gradient_accumulation_steps",
        "scales the loss of a micro-batch that has no number of tokens",
        "the mean of a window would be the sum of its micro-batches",
        within=f"{_TRAINER}._run_epoch",
    ),
    _used(
        "transformers.trainer",
        "get_model_param_count",
        "replaced while training runs, so that the log counts the whole model",
        "training is an error",
        takes="model, trainable_only=",
    ),
    _used(
        "transformers.trainer",
        "SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME",
        "names files of a checkpoint as the stock Trainer does",
        _NO_IMPORT,
    ),
    _used(
        "transformers.trainer_utils",
        "rotate_checkpoints",
        "deletes the oldest checkpoints once the new one has its place",
        _NO_IMPORT,
        takes="output_dir, save_total_limit, best_model_checkpoint, use_mtime=",
    ),
    _used("transformers.trainer_utils", "SaveStrategy", "tells whether checkpoints are saved", _NO_IMPORT),
    _used("transformers.trainer_utils", "HPSearchBackend", "refuses backends that rank 0 would run alone", _NO_IMPORT),
    _used("transformers.trainer_pt_utils", "LabelSmoother", "refuses a label smoother that is set by hand", _NO_IMPORT),
    _used(
        "transformers.conversion_mapping",
        "get_model_conversion_mapping",
        "tells which tensors of a checkpoint become which parameters",
        _NO_LOADING,
        takes="model",
    ),
    _used(
        "transformers.core_model_loading",
        "Concatenate MergeModulelist WeightConverter WeightRenaming dot_natural_key",
        "converts tensors of a checkpoint, such as those of experts, as `from_pretrained` does",
        _NO_LOADING,
    ),
    _used(
        "transformers.core_model_loading",
        "rename_source_key",
        "finds the parameter that a tensor of a checkpoint belongs to",
        _NO_LOADING,
        takes="source_key, weight_renamings, weight_converters, prefix, meta_state_dict",
    ),
    _used(
        "transformers.core_model_loading",
        "revert_weight_conversion",
        "names tensors on disk as `save_pretrained` does",
        _NO_LOADING,
        takes="model, state_dict",
    ),
    _used(
        "transformers.modeling_utils",
        "remove_tied_weights_from_state_dict",
        "leaves out weights that are tied, as `save_pretrained` does",
        _NO_LOADING,
        takes="state_dict, model",
    ),
    _used(
        _MODEL,
        "_adjust_missing_and_unexpected_keys",
        "tells which tensors of a checkpoint nobody needs",
        _NO_LOADING,
        takes="self, loading_info",
    ),
    _used(
        _MODEL,
        "_init_weights",
        "draws random weights, and fills buffers of a model on the meta device",
        "no model can start on the meta device",
        takes="self, module",
    ),
    _used(_MODEL, "_keys_to_ignore_on_save", "leaves tensors out of a checkpoint", "saving is an error"),
    _used(
        _MODEL,
        "_loss_function",
        "refuses a loss of the user's own",
        _NO_REFUSAL,
        within=f"{_MODEL}.loss_function",
    ),
    _used(
        "transformers.modeling_utils",
        "ALL_ATTENTION_FUNCTIONS",
        "finds the attention function that a model asks for",
        _NO_IMPORT,
    ),
    _used(
        _CONFIG,
        "_attn_implementation",
        "reads which attention a model asks for",
        "models cannot be cut",
        within=f"{_CONFIG}.__post_init__",
    ),
    _used(
        _CONFIG,
        "_name_or_path",
        "reads the base model for the model card",
        "the card would not name the base model",
        within=f"{_CONFIG}.__post_init__",
    ),
    _used(
        _MODEL,
        "_gradient_checkpointing_func",
        "refuses a checkpoint function of the user's own",
        _NO_REFUSAL,
        within=f"{_MODEL}._set_gradient_checkpointing",
    ),
    _used(
        "transformers.masking_utils",
        "create_causal_mask create_sliding_window_causal_mask",
        "makes the masks that a model's own forward would make",
        _NO_IMPORT,
    ),
    _used(
        "transformers.loss.loss_utils",
        "LOSS_MAPPING ForCausalLMLoss",
        "compares a model's loss with the one that is computed",
        _NO_IMPORT,
    ),
    _used(
        "transformers.models.gpt2.modeling_gpt2:GPT2Attention",
        "_upcast_and_reordered_attn",
        "computes GPT-2's attention with `reorder_and_upcast_attn`",
        _NO_FAMILY,
        takes="self, query, key, value, attention_mask",
    ),
    *(
        _used(f"transformers.models.{home}", "eager_attention_forward", "is the model's eager attention", _NO_IMPORT)
        for home in (
            "gpt2.modeling_gpt2",
            "gpt_neox.modeling_gpt_neox",
            "llama.modeling_llama",
        )
    ),
    *(
        _used(f"transformers.models.{home}", "apply_rotary_pos_emb", "rotates queries and keys", _NO_IMPORT)
        for home in ("gpt_neox.modeling_gpt_neox", "llama.modeling_llama")
    ),
    *(
        _used(
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

_INSTEAD = "its place is taken on the Accelerator of a loop: it would do something else than its name says"

_ACCELERATE = (
    _used(
        _ACCELERATOR,
        "backward accumulate unwrap_model save_model get_state_dict save_state load_state",
        f"{_INSTEAD}, so it is refused",
        "it would not be refused under a new name",
    ),
    _used(
        _ACCELERATOR,
        "clip_grad_norm_",
        f"{_INSTEAD}, so it clips by the norm over all ranks",
        "each rank would clip by the norm of its own part of the gradient",
        takes="self, parameters, max_norm, norm_type=",
    ),
    _used(
        _ACCELERATOR,
        "gather_for_metrics",
        f"{_INSTEAD}, so it counts ranks that share a batch once",
        "metrics would count samples several times",
        takes="self, input_data, use_gather_object=",
    ),
    _used(
        _ACCELERATOR,
        "_is_accelerate_prepared",
        "set on a cut model, so that Accelerate wraps nothing around it",
        "Accelerate would wrap the cut model in DistributedDataParallel",
        within=f"{_ACCELERATOR}.prepare_model",
    ),
    _used(
        _ACCELERATOR,
        "_schedulers",
        "lists the scheduler of a loop, as `prepare` does",
        "preparing a scheduler is an error",
        within=f"{_ACCELERATOR}.__init__",
    ),
    _used(
        "accelerate.state:AcceleratorState",
        "_shared_state",
        "keeps the layout of one trainer from others of the process",
        "making a trainer is an error",
    ),
    _used(
        "accelerate.hooks:ModelHook",
        "_hf_hook",
        "refuses a model with hooks of Accelerate, which would never run",
        _NO_REFUSAL,
        within="accelerate.hooks:add_hook_to_module",
    ),
)

_NO_EXACT = "a window is an error on this device"

_TORCH = (
    _used(
        "torch.distributed.rendezvous",
        "_rendezvous_handlers",
        "gives every start of the processes names of its own in torchrun's store (see `separate_starts`)",
        "processes that torchrun has started again would hang",
    ),
    _used(
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "finds the store of the process group, for heartbeats",
        _NO_IMPORT,
    ),
    _used(
        "torch._C._distributed_c10d",
        "_broadcast_coalesced",
        "broadcasts small parameters together (`shard_optimizer`)",
        _NO_IMPORT,
    ),
    _used(
        "torch.distributed.optim:ZeroRedundancyOptimizer",
        "_partition_parameters",
        "tells which rank steps which parameters (`shard_optimizer`)",
        "the first step with shard_optimizer is an error",
        takes="self",
    ),
    _used(
        "torch.distributed._checkpointable:_Checkpointable",
        "__create_chunk_list__ __create_write_items__ __get_tensor_shard__",
        "lets a part of a tensor be saved as a part of the whole",
        "optimizer states cannot be saved",
    ),
    _used("torch:Tensor", "_make_wrapper_subclass", "stands for a whole tensor", "optimizer states cannot be saved"),
    _used("torch:Tensor", "_version", "tells whether a tensor was written to", "training is an error"),
    _used("torch:UntypedStorage", "_cdata", "tells whether tensors share memory", "saving is an error"),
    _used(
        "torch.autograd:Variable",
        "_execution_engine",
        "runs a small backward graph without the checks of `torch.autograd.backward`",
        _NO_STEP,
    ),
    _used("torch", "_foreach_copy_ _foreach_div_", "copies and divides many gradients at once", _NO_STEP),
    _used(
        _MODULE,
        "_parameters _buffers _non_persistent_buffers_set",
        "lists the tensors of a module itself",
        "a model on the meta device is an error",
        within=f"{_MODULE}.__init__",
    ),
    _used(
        _MODULE,
        "_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks",
        "refuses hooks that would never run",
        "making a trainer is an error",
        within=f"{_MODULE}.__init__",
    ),
    _used(_MODULE, "_compiled_call_impl", "refuses a model that was compiled", _NO_REFUSAL),
    _used(
        "torch._dynamo.eval_frame:OptimizedModule",
        "_orig_mod",
        "names torch.compile in the error for an unknown class",
        "the error would not say so",
        within="torch._dynamo.eval_frame:OptimizedModule.__init__",
    ),
    _used("torch:Tensor", "_backward_hooks", "refuses hooks on gradients", "making a trainer is an error"),
    _used(
        "torch:Tensor",
        "_post_accumulate_grad_hooks",
        "refuses hooks on gradients",
        _NO_REFUSAL,
    ),
    _used(
        "torch.optim.lr_scheduler:LRScheduler",
        "_step_count",
        "tells how often a scheduler of a loop has stepped",
        "stepping a scheduler of a loop is an error",
        within="torch.optim.lr_scheduler:LRScheduler.step",
    ),
    _used("torch.utils._python_dispatch", "TorchDispatchMode", "counts the memory of a window on CPU", _NO_IMPORT),
    _used("torch.utils._pytree", "tree_leaves", "walks the results of operators", _NO_IMPORT),
    _used(
        "torch.utils._pytree",
        "tree_flatten tree_unflatten TreeSpec",
        "walks what the function of a CUDA graph takes and returns",
        _NO_IMPORT,
    ),
    _used("torch.cuda", "_sleep", "keeps the device busy while operators are measured", "measuring is an error"),
    _used(
        "torch:ops.aten",
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
        "computes a block of attention with cp_size > 1, on CPU",
        _NO_EXACT,
    ),
    _used(
        "torch:ops.aten",
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward _flash_attention_forward "
        "_flash_attention_backward _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_efficient_attention_backward",
        "computes a block of attention with cp_size > 1, on CUDA",
        _NO_EXACT,
    ),
    _used("torch:ops.aten", "_fused_rms_norm _fused_rms_norm_backward", "computes norms in one kernel", _NO_EXACT),
)

_OTHERS = (
    _used(
        "flash_attn.flash_attn_interface",
        "_flash_attn_forward _flash_attn_backward",
        "computes a block of attention with cp_size > 1 and `flash_attention_2`",
        _NO_EXACT,
    ),
    _used(
        "peft.tuners.lora",
        "LoraLayer Linear Embedding",
        "finds LoRA beside linears and embeddings",
        "a model with adapters is an error",
    ),
    _used(
        "peft.tuners.tuners_utils",
        "BaseTunerLayer",
        "refuses adapters that are not LoRA",
        "a model with adapters is an error",
    ),
    _used(
        "peft.utils.other",
        "ModulesToSaveWrapper AuxiliaryTrainingWrapper",
        "finds modules that are trained beside adapters",
        "a model with adapters is an error",
    ),
    _used(
        "trl.trainer.sft_trainer",
        "SFTTrainer",
        "known by its module and name, since TRL is not imported",
        "options of SFTTrainer that cannot be honoured would be ignored",
    ),
)

USED: tuple[Used, ...] = tuple(itertools.chain(*_TRANSFORMERS, *_ACCELERATE, *_TORCH, *_OTHERS))
