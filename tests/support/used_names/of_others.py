"""The names of Accelerate, PEFT, TRL and flash-attn that hf_helix uses.

In:   nothing.
Out:  rows, see `used`.
Must hold: as `used`.
"""

from __future__ import annotations

import itertools

from support.used_names.rows import NO_REFUSAL, Used, used

_ACCELERATOR = "accelerate.accelerator:Accelerator"
_INSTEAD = "its place is taken on the Accelerator of a loop: it would do something else than its name says"
_NO_ADAPTERS = "a model with adapters is an error"

OTHERS: tuple[Used, ...] = tuple(
    itertools.chain(
        used(
            _ACCELERATOR,
            "backward accumulate unwrap_model save_model get_state_dict save_state load_state",
            f"{_INSTEAD}, so it is refused",
            "it would not be refused under a new name",
        ),
        used(
            _ACCELERATOR,
            "clip_grad_norm_",
            f"{_INSTEAD}, so it clips by the norm over all ranks",
            "each rank would clip by the norm of its own part of the gradient",
            takes="self, parameters, max_norm, norm_type=",
        ),
        used(
            _ACCELERATOR,
            "gather_for_metrics",
            f"{_INSTEAD}, so it counts ranks that share a batch once",
            "metrics would count samples several times",
            takes="self, input_data, use_gather_object=",
        ),
        used(
            _ACCELERATOR,
            "_is_accelerate_prepared",
            "set on a cut model, so that Accelerate wraps nothing around it",
            "Accelerate would wrap the cut model in DistributedDataParallel",
            within=f"{_ACCELERATOR}.prepare_model",
        ),
        used(
            _ACCELERATOR,
            "_schedulers",
            "lists the scheduler of a loop, as `prepare` does",
            "preparing a scheduler is an error",
            within=f"{_ACCELERATOR}.__init__",
        ),
        used(
            "accelerate.state:AcceleratorState",
            "_shared_state",
            "keeps the layout of one trainer from others of the process",
            "making a trainer is an error",
        ),
        used(
            "accelerate.hooks:ModelHook",
            "_hf_hook",
            "refuses a model with hooks of Accelerate, which would never run",
            NO_REFUSAL,
            within="accelerate.hooks:add_hook_to_module",
        ),
        used(
            "flash_attn.flash_attn_interface",
            "_flash_attn_forward _flash_attn_backward",
            "computes a block of attention with cp_size > 1 and `flash_attention_2`",
            "a window is an error",
        ),
        used(
            "peft.tuners.lora",
            "LoraLayer Linear Embedding",
            "finds LoRA beside linears and embeddings",
            _NO_ADAPTERS,
        ),
        used(
            "peft.tuners.lora:LoraLayer",
            "lora_A lora_B lora_embedding_A lora_embedding_B lora_dropout scaling lora_variant merged_adapters",
            "reads the matrices of adapters, and refuses variants and merged adapters",
            _NO_ADAPTERS,
            within="peft.tuners.lora:LoraLayer.__init__",
        ),
        used(
            "peft.tuners.tuners_utils",
            "BaseTunerLayer",
            "refuses adapters that are not LoRA",
            _NO_ADAPTERS,
        ),
        used(
            "peft.utils.other",
            "ModulesToSaveWrapper AuxiliaryTrainingWrapper",
            "finds modules that are trained beside adapters",
            _NO_ADAPTERS,
        ),
        used(
            "peft.utils.other:ModulesToSaveWrapper",
            "modules_to_save",
            "reads the copies of a module that is trained beside adapters",
            _NO_ADAPTERS,
            within="peft.utils.other:ModulesToSaveWrapper.init_modules",
        ),
        used(
            "peft.utils.other:AuxiliaryTrainingWrapper",
            "original_module",
            "reads the module itself that is trained beside adapters",
            _NO_ADAPTERS,
            within="peft.utils.other:AuxiliaryTrainingWrapper.__init__",
        ),
        used(
            "trl.trainer.sft_trainer",
            "SFTTrainer",
            "known by its module and name, since TRL is not imported",
            "options of SFTTrainer that cannot be honoured would be ignored",
        ),
    )
)
