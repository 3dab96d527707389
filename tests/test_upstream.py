"""The tables of other packages' private names: they fit what is installed, are complete, and a change is an error."""

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.version import Version
from support.forked_ranks import fork_ranks
from transformers import Trainer

import hf_helix
from hf_helix.integrations import upstream
from hf_helix.integrations.trainer.trainer import HelixTrainerMixin
from hf_helix.integrations.upstream import KNOWN, UpstreamChanged, check_class, mentions, problems_of_class, resolve

# -- every private or unstable name of another package that hf_helix calls, reads or sets -----------------------------

OWNED: dict[str, str] = {
    "transformers.trainer:Trainer": "_save_scaler _prepare_input _prepare_inputs _get_num_items_in_batch compute_loss "
    "compute_loss_context_manager "
    "autocast_smart_context_manager _wrap_model _prepare_context_parallel_inputs",
    "transformers.trainer": "SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME",
    "transformers.trainer_utils": "rotate_checkpoints SaveStrategy HPSearchBackend",
    "transformers.trainer_jit_checkpoint": "JITCheckpointCallback",
    "transformers.trainer_jit_checkpoint:CheckpointManager": "_enable_checkpoint",
    "transformers.trainer_pt_utils": "LabelSmoother",
    "transformers.conversion_mapping": "get_model_conversion_mapping",
    "transformers.core_model_loading": "Concatenate MergeModulelist WeightConverter WeightRenaming dot_natural_key "
    "rename_source_key revert_weight_conversion",
    "transformers.modeling_utils": "remove_tied_weights_from_state_dict ALL_ATTENTION_FUNCTIONS",
    "transformers.modeling_utils:PreTrainedModel": "_adjust_missing_and_unexpected_keys _init_weights "
    "_keys_to_ignore_on_save",
    "transformers.masking_utils": "create_causal_mask create_sliding_window_causal_mask",
    "transformers.loss.loss_utils": "LOSS_MAPPING ForCausalLMLoss",
    "transformers.models.auto.modeling_auto": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES "
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES "
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "transformers.models.gpt2.modeling_gpt2:GPT2Attention": "_upcast_and_reordered_attn",
    "transformers.models.gpt2.modeling_gpt2": "eager_attention_forward",
    "transformers.models.gpt_neox.modeling_gpt_neox": "eager_attention_forward apply_rotary_pos_emb",
    "transformers.models.llama.modeling_llama": "eager_attention_forward apply_rotary_pos_emb LlamaRMSNorm",
    "transformers.activations": "SiLUActivation",
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts": "_apply_gate",
    "transformers.models.phimoe.modeling_phimoe:PhimoeExperts": "_apply_gate",
    "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts": "_apply_gate",
    "transformers.models.qwen3_next.modeling_qwen3_next": "apply_mask_to_padding_states",
    "accelerate.accelerator:Accelerator": "backward accumulate unwrap_model save_model save_state load_state "
    "join_uneven_inputs clip_grad_norm_ gather_for_metrics",
    "accelerate.state:AcceleratorState": "_shared_state",
    "torchao.optim.adam:_AdamBase": "_new_buffer _subclass_zeros",
    "peft.tuners.lora": "LoraLayer Linear Embedding",
    "peft.tuners.tuners_utils": "BaseTunerLayer",
    "peft.tuners.tuners_utils:BaseTunerLayer": "_disable_adapters _active_adapter",
    "peft.utils.other": "ModulesToSaveWrapper AuxiliaryTrainingWrapper",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.utils": "_ChunkedLogProbFunction",
    "trl.trainer.distillation_trainer": "ChunkedDivergenceFunction",
    "trl.trainer.grpo_trainer:GRPOTrainer": "_generate_and_score_completions",
    "trl.trainer.dpo_trainer:DPOTrainer": "_precompute_ref_logps _compute_loss compute_ref_log_probs",
    "trl.trainer.kto_trainer:KTOTrainer": "_compute_loss compute_ref_log_probs _compute_kl_logps",
    "trl.generation.vllm_generation:VLLMGeneration": "_iter_named_params sync_weights generate",
    "transformers.utils.generic": "TransformersKwargs",
    "accelerate.utils.modeling": "get_mixed_precision_context_manager",
    "torch": "_foreach_norm _has_compatible_shallow_copy_type _foreach_copy_ _foreach_div_",
    "torch:_C": "_cuda_endAllocateToPool _cuda_releasePool _EnableTorchFunction DisableTorchFunction",
    "torch.cuda": "_sleep",
    "torch.distributed.rendezvous": "_rendezvous_handlers",
    "torch.distributed.distributed_c10d": "_get_default_store _set_pg_timeout",
    "torch.distributed:ProcessGroup": "_device_types _get_backend",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    "torch.serialization": "_get_layout",
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
    "_flash_attention_backward _softmax _to_copy _unsafe_view _unsafe_index _log_softmax "
    "_grouped_mm _scaled_mm_v2",
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
    "accelerate.accelerator:Accelerator.__init__": "_schedulers _optimizers",
    "transformers.integrations.integration_utils:WandbCallback.__init__": "_log_model",
    "accelerate.hooks:add_hook_to_module": "_hf_hook",
    "trl.trainer.dpo_trainer:DPOTrainer.__init__": "_tp_size _is_vision_dataset _metrics "
    "precompute_ref_logps ref_model",
    "trl.trainer.kto_trainer:KTOTrainer.__init__": "_tp_size _is_vision_dataset _metrics "
    "precompute_ref_logps ref_model calculate_KL",
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": "_weight_metadata _iter_named_params",
    "trl.generation.vllm_generation:VLLMGeneration.__init__": "mode enable_sleep_mode accelerator",
    "trl.trainer.grpo_trainer:GRPOTrainer.__init__": "vllm_generation",
    "peft.tuners.lora:LoraLayer.__init__": "lora_A lora_B lora_embedding_A lora_embedding_B lora_dropout scaling "
    "lora_variant merged_adapters",
    "peft.utils.other:ModulesToSaveWrapper.init_modules": "modules_to_save",
    "peft.utils.other:AuxiliaryTrainingWrapper.__init__": "original_module",
    "torch.nn.modules.module:Module.__delattr__": "_parameters _buffers _non_persistent_buffers_set",
    "torch.nn.modules.module:Module._call_impl": "_forward_pre_hooks _forward_hooks _backward_pre_hooks "
    "_backward_hooks",
    "torch._dynamo.eval_frame:OptimizedModule.__init__": "_orig_mod",
    "torch.optim.lr_scheduler:LRScheduler.step": "_step_count",
    "torch.optim:Optimizer.__init__": "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
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
    "trl.trainer.dpo_trainer:DPOTrainer.compute_ref_log_probs": "self, model, inputs",
    "trl.trainer.kto_trainer:KTOTrainer.compute_ref_log_probs": "self, model, inputs",
    "trl.trainer.kto_trainer:KTOTrainer._compute_kl_logps": "self, model, batch",
    "trl.generation.vllm_generation:VLLMGeneration._iter_named_params": "self",
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": "self",
    "trl.generation.vllm_generation:VLLMGeneration.generate": "self, prompts, images, num_generations, profiler=",
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


PACKAGE = Path(hf_helix.__file__).parent
ROOT = PACKAGE.parent
DOORS = ("transformers", "accelerate", "trl")
METHODS = set(USED.values())


# -- a change is an error ------------------------------------------------------------------------------------------


def stock_without(monkeypatch: pytest.MonkeyPatch, *names: str, **others: Any) -> type:
    """A Trainer that lacks some methods, and has others."""
    given = {name: value for name, value in vars(Trainer).items() if name not in names}
    kind = type("Trainer", (), {**given, **others})
    monkeypatch.setattr(sys.modules[Trainer.__module__], "Trainer", kind)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0")
    return kind


def error_of(stock: type) -> str:
    with pytest.raises(UpstreamChanged) as result:
        type("MyTrainer", (HelixTrainerMixin, stock), {})
    return str(result.value)


def test_a_hook_that_was_renamed_is_an_error_with_a_version_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    text = error_of(stock_without(monkeypatch, "_clip_grad_norm", _clip_gradients=Trainer._clip_grad_norm))
    assert text == (
        f"hf_helix {hf_helix.__version__} does not fit what is installed; use `pip install 'transformers~=5.24.0'`, "
        "known to work (transformers 5.17 to 5.24), or a newer hf_helix: transformers 5.99.0: Trainer._clip_grad_norm "
        "is gone; hf_helix overrides it: without ours, each rank would clip by the norm of its own part of the "
        "gradient"
    )


def test_every_hook_that_was_renamed_or_is_not_called_any_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stay for a version or two after its callers have gone."""
    hooks = {name for base in HelixTrainerMixin.__mro__ for name in vars(base).keys() & vars(Trainer).keys()}
    hooks = {name for name in hooks if not name.startswith("__")}
    assert len(hooks) > 30
    text = error_of(stock_without(monkeypatch, *hooks))
    assert set(re.findall(r"Trainer\.(\w+) is gone; hf_helix overrides", text)) == hooks
    text = error_of(stock_without(monkeypatch, "_run_epoch", _run_epoch=lambda self, **kwargs: self.training_step()))
    assert "Trainer._clip_grad_norm is not called any more by Trainer; hf_helix" in text


@pytest.mark.parametrize(
    ("method", "changed", "words"),
    [
        ("_save", lambda self, output_dir=None: None, "has no parameter 'state_dict' any more, its parameters are"),
        ("_save_checkpoint", lambda self, trial, model: None, "has its parameter 'model' at another place, its"),
        ("_load_rng_state", lambda self, checkpoint, strict=True: None, "has a new parameter 'strict'"),
        ("_inner_training_loop", lambda self, ignored=None: None, "has no parameter 'ignore_keys_for_eval' any more"),
        ("get_tp_size", property(lambda self: 1), "is a property now"),
    ],
)
def test_other_parameters_are_an_error(monkeypatch: pytest.MonkeyPatch, method: str, changed: Any, words: str) -> None:
    assert f"Trainer.{method} {words}" in error_of(stock_without(monkeypatch, **{method: changed}))


def test_a_new_method_with_a_name_of_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """We would override it without knowing. Only classes of the packages in the table are compared: what users put
    between is theirs."""
    with pytest.raises(UpstreamChanged, match=r"Trainer\.floating_point_ops exists, and hf_helix uses that name"):
        type("Mine", (HelixTrainerMixin, Trainer), {"floating_point_ops": None, "__module__": "hf_helix.mine"})
    between = type("Between", (Trainer,), {"_save_checkpoint": lambda self, *, other: None})
    mine = type("Mine", (HelixTrainerMixin, between), {"_save": lambda self, folder: None})
    assert check_class(mine) is mine
    stock = stock_without(monkeypatch, _run_window=lambda self: None)
    assert "Trainer._run_window exists, and hf_helix uses that name for something of its own" in error_of(stock)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "transformers.core_model_loading:rename_source_key",
            lambda source_key, table: None,
            "cannot be called with (source_key, weight_renamings, weight_converters, prefix, meta_state_dict) any more",
        ),
        ("accelerate.accelerator:Accelerator.prepare_model", lambda self, model: model, "knows no _is_accelerate_prep"),
        (
            "torch.distributed.rendezvous:_rendezvous_handlers",
            None,
            "torch.distributed.rendezvous:_rendezvous_handlers is gone",
        ),
    ],
)
def test_a_used_name_that_changed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Callable[..., Any] | None, words: str
) -> None:
    module, _, attribute = name.rpartition("." if "." in name.partition(":")[2] else ":")
    owner = upstream.resolve(module) if ":" in module else importlib.import_module(module)
    monkeypatch.delattr(owner, attribute) if value is None else monkeypatch.setattr(owner, attribute, value)
    assert any(words in problem_of_use(row) for row in USED)


LOST = "import transformers.core_model_loading as m; del m.dot_natural_key, m.rename_source_key\n"
ANEW = """import sys
for name in [name for name in sys.modules if name.startswith(("hf_helix.integrations", "hf_helix.checkpoint"))]:
    del sys.modules[name]
"""


def test_a_name_that_cannot_be_imported_says_what_to_install(tmp_path: Path) -> None:
    """In a process that has imported everything else."""
    (tmp_path / "script.py").write_text(f"{ANEW}{LOST}from hf_helix import HelixTrainer")
    (process,) = fork_ranks(tmp_path, tmp_path / "script.py", world=1)
    assert process.wait(120) == 1
    said = (tmp_path / "0.log").read_text()
    last = said[said.index("hf_helix.integrations.upstream.UpstreamChanged") :]
    assert re.search("cannot import name '(dot_natural|rename_source)_key' from 'transformers.core_", last)
    assert "use `pip install 'transformers~=5.24.0'`" in last


# -- the tables fit what is installed ------------------------------------------------------------------------------


def every_class() -> Iterator[type]:
    """The classes of the package that stand on a class of another package."""
    for result in pkgutil.walk_packages(hf_helix.__path__, "hf_helix."):
        if not result.name.endswith(("__main__", ".triton_kernels")):  # no classes; needs Triton
            module = importlib.import_module(result.name)
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == result.name:
                    yield kind


def test_every_row_fits_what_is_installed() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    assert TAKES.keys() <= USED.keys()
    installed = [row for row in USED if row.partition(":")[0].partition(".")[0] in KNOWN]
    for row in installed:
        importlib.import_module(row.partition(":")[0])
    assert [words for words in map(problem_of_use, installed) if words] == []
    trl = importlib.import_module("trl")
    assert problems_of_class(type("Mine", (HelixTrainerMixin, trl.SFTTrainer), {})) == []


def test_the_known_versions_are_those_that_are_promised_and_tested() -> None:
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = "\n".join([*project["dependencies"], *extras["recipes"], *extras["trl"]])
    promised = dict(re.findall(r"(\w+)>=([\d.]+)", wanted))
    tested = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    runs = json.loads((ROOT / "docs" / "versions.json").read_text())  # of tests, see `support.versions.record`
    for name, (oldest, newest) in KNOWN.items():
        assert promised[name] == oldest
        assert Version(oldest) <= Version(tested[name]) <= Version(newest)
        recorded = {".".join(run["versions"].get(name, "").split(".")[:2]) for run in runs}
        assert {oldest, newest, tested[name]} <= recorded, name


# -- the tables are complete, and have no dead rows -----------------------------------------------------------------


def test_every_class_on_one_of_another_package_is_checked() -> None:
    """A method that overrides one of another package, and is not marked, is a problem of its class."""
    checked = [kind for kind in every_class() if any(package_of(base) in DOORS for base in kind.__mro__)]
    assert {"HelixTrainer", "HelixPlugin", "CutAccelerator", "SharedScheduler"} <= {kind.__name__ for kind in checked}
    assert [problem for kind in checked for problem in problems_of_class(kind)] == []


def package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


class Use(NamedTuple):
    """A private or unstable name in a line of the package."""

    name: str
    where: str


DOCUMENTED = {
    *("transformers.modeling_outputs", "transformers.utils", "transformers.utils.logging"),
    *("accelerate.parallelism_config", "accelerate.scheduler", "accelerate.state", "accelerate.utils"),
}
ENDINGS = re.compile("_(again|foreach_|kwargs|multiplier|name|saving|size|sort_index|token_id|token_index)")
"""Parts of other words."""
OURS = {"_hf_helix_told", "_is_cut_by_helix"}  # set on objects of others
OF_PYTHON = {"_replace", "_getframe"}  # documented, of named tuples and `sys`


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 2


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What is imported of private or undocumented modules, or is private itself, as `module:name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in KNOWN:
            root, _, rest = node.module.partition(".")
            hidden = any(part.startswith("_") for part in rest.split("."))
            unstable = root != "torch" and rest and node.module not in DOCUMENTED
            for alias in node.names:
                if hidden or is_private(alias.name) or (unstable and not hasattr(sys.modules.get(root), alias.name)):
                    yield f"{node.module}:{alias.name}", node.lineno


def peft_chain(node: ast.AST) -> str:
    """`peft.tuners.lora.Linear` as its last name; empty for anything else."""
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    text = ast.unparse(node) if isinstance(root, ast.Name) and root.id == "peft" else ""
    return text.rpartition(".")[2] if re.fullmatch(r"peft\.\w+\.\w+\.\w+", text) else ""


@functools.cache
def uses_of_package() -> list[Use]:
    return list(every_use())


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def every_use() -> Iterator[Use]:
    trees = {path: tree for path, tree in parsed().items() if path.stem != "upstream"}
    own = {name for tree in trees.values() for name in defined(tree)} | OURS | OF_PYTHON
    for path, tree in trees.items():
        where = str(path.relative_to(PACKAGE))
        yield from (Use(name.partition(":")[2], f"{where}:{line} {name}") for name, line in imports(tree))
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Attribute):
                hidden = is_private(node.attr) and node.attr not in own
                hidden = hidden and ast.unparse(node.value) not in sys.stdlib_module_names
                name = node.attr if hidden else peft_chain(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                hidden = is_private(node.value) and node.value not in own and not ENDINGS.fullmatch(node.value)
                name = node.value if hidden else ""
            if name:
                yield Use(name, f"{where}:{node.lineno}")


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file gives to its own functions, classes and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "__setattr__":
            yield from (part.value for part in node.args if isinstance(part, ast.Constant))


def test_every_private_name_that_is_used_is_in_the_table() -> None:
    assert [use for use in uses_of_package() if use.name not in METHODS] == []
    # Were it blind, any table would do.
    result = {use.name for use in uses_of_package()}
    assert {"_schedulers", "_hf_hook", "dot_natural_key", "_rendezvous_handlers", "ModulesToSaveWrapper"} <= result
    # The tables have no dead rows.
    names = set(names_in_code())
    assert METHODS - names == set()
    assert "MergeModulelist" in names
    assert "_Checkpointable" not in names  # it stands in a docstring


def names_in_code() -> Iterator[str]:
    """The names in the code of the package; a text counts if it is a name and nothing else."""
    for tree in parsed().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.FunctionDef | ast.alias):
                yield node.name
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"(?:^|\.)(\w+)$", node.value)
