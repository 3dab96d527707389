"""The names of torch that hf_helix uses.

In:   nothing.
Out:  rows, see `used`.
Must hold: as `used`.
"""

from __future__ import annotations

import itertools

from support.used_names.rows import NO_IMPORT, NO_REFUSAL, NO_STEP, Used, used

_MODULE = "torch.nn.modules.module:Module"
_NO_WINDOW = "a window is an error on this device"

TORCH: tuple[Used, ...] = tuple(
    itertools.chain(
        used(
            "torch.distributed.rendezvous",
            "_rendezvous_handlers",
            "gives every start of the processes names of its own in torchrun's store (see `separate_starts`)",
            "processes that torchrun has started again would hang",
        ),
        used(
            "torch.distributed.distributed_c10d",
            "_get_default_store",
            "finds the store of the process group, for heartbeats",
            NO_IMPORT,
        ),
        used(
            "torch.distributed._checkpointable:_Checkpointable",
            "__create_chunk_list__ __create_write_items__ __get_tensor_shard__",
            "lets a part of a tensor be saved as a part of the whole",
            "optimizer states cannot be saved",
        ),
        used("torch:Tensor", "_make_wrapper_subclass", "stands for a whole tensor", "optimizer states cannot be saved"),
        used("torch:Tensor", "_version", "tells whether a tensor was written to", "training is an error"),
        used("torch:UntypedStorage", "_cdata", "tells whether tensors share memory", "saving is an error"),
        used(
            "torch.autograd:Variable",
            "_execution_engine",
            "runs a small backward graph without the checks of `torch.autograd.backward`",
            NO_STEP,
        ),
        used(
            "torch",
            "_foreach_norm _has_compatible_shallow_copy_type",
            "knows these functions where a script calls them with divided parameters",
            "clipping by a script is slower, and `model.to()` of a cut model an error",
        ),
        used(
            "torch:Tensor", "_is_view", "tells which functions return views", "reading a row of a parameter is an error"
        ),
        used("torch", "_foreach_copy_ _foreach_div_", "copies and divides many gradients at once", NO_STEP),
        used(
            _MODULE,
            "_parameters _buffers _non_persistent_buffers_set",
            "lists the tensors of a module itself",
            "a model on the meta device is an error",
            within=f"{_MODULE}.__delattr__",
        ),
        used(
            _MODULE,
            "_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks",
            "refuses hooks that would never run",
            "making a trainer is an error",
            within=f"{_MODULE}._call_impl",
        ),
        used(_MODULE, "_compiled_call_impl", "refuses a model that was compiled", NO_REFUSAL),
        used(
            "torch._dynamo.eval_frame:OptimizedModule",
            "_orig_mod",
            "names torch.compile in the error for an unknown class",
            "the error would not say so",
            within="torch._dynamo.eval_frame:OptimizedModule.__init__",
        ),
        used("torch:Tensor", "_backward_hooks", "refuses hooks on gradients", "making a trainer is an error"),
        used(
            "torch:Tensor",
            "_post_accumulate_grad_hooks",
            "refuses hooks on gradients",
            NO_REFUSAL,
        ),
        used(
            "torch.optim.lr_scheduler:LRScheduler",
            "_step_count",
            "tells how often a scheduler of a loop has stepped",
            "stepping a scheduler of a loop is an error",
            within="torch.optim.lr_scheduler:LRScheduler.step",
        ),
        used("torch.utils._python_dispatch", "TorchDispatchMode", "counts the memory of a window on CPU", NO_IMPORT),
        used("torch.utils._pytree", "tree_leaves", "walks the results of operators", NO_IMPORT),
        used("torch.utils._pytree", "tree_map", "walks what a layer is called with", NO_IMPORT),
        used(
            "torch.utils._pytree",
            "tree_flatten tree_unflatten TreeSpec",
            "walks what the function of a CUDA graph, or a layer, takes and returns",
            NO_IMPORT,
        ),
        used(
            "torch.multiprocessing.reductions",
            "StorageWeakRef",
            "tells when the memory of a tensor is freed, on CPU",
            NO_IMPORT,
        ),
        used("torch.cuda", "_sleep", "keeps the device busy while operators are measured", "measuring is an error"),
        used(
            "torch:ops.aten",
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
            "computes a block of attention with cp_size > 1, on CPU",
            _NO_WINDOW,
        ),
        used(
            "torch:ops.aten",
            "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward _flash_attention_forward "
            "_flash_attention_backward _scaled_dot_product_efficient_attention "
            "_scaled_dot_product_efficient_attention_backward",
            "computes a block of attention with cp_size > 1, on CUDA",
            _NO_WINDOW,
        ),
        used(
            "torch:ops.aten",
            "_softmax _to_copy _unsafe_view",
            "knows these operations in the trace of a model",
            "hf_helix cannot be imported, or models whose traces show the operation under another name are refused",
        ),
        used("torch:ops.aten", "_fused_rms_norm _fused_rms_norm_backward", "computes norms in one kernel", _NO_WINDOW),
        used(
            "torch:ops.aten",
            "_log_softmax _grouped_mm",
            "knows these operations while it counts what operators compute",
            "hf-helix simulate and hf-helix doctor are errors",
        ),
        used(
            "torch:ops.aten.mm.default",
            "_schema",
            "tells which operations write to what they read",
            "hf-helix simulate and hf-helix doctor are errors",
        ),
    )
)
