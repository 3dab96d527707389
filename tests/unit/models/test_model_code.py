"""What stands in the place of Transformers' code is run, or refused by name at construction."""

import copy
import functools
import gc
import re
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.jobs import build
from support.marks import slow
from support.models import llama, sequences, tiny
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_helix.models.registry import family_of
from hf_helix.models.small_config import default_config
from hf_helix.models.stock.alike import description

IDS = torch.arange(1, 9).unsqueeze(0)


def trainer_of(model: Any, folder: Path, **changes: Any) -> Any:
    return build(str(folder), {}, {"max_steps": 1, **changes}, model=model, train_dataset=sequences(4))


def small(**changes: Any) -> Any:
    return llama(**{"num_hidden_layers": 1, **changes})


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_what_transformers_sets_itself_passes(family: str, tmp_path: Path) -> None:
    """Decorated forwards, the hooks of a first call, and those that gradients of inputs need."""
    model = tiny(family, num_hidden_layers=1)
    model(IDS, labels=IDS, output_hidden_states=True, output_attentions=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    assert any(module._forward_hooks for module in model.modules())
    trainer_of(model, tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_peft_sets_itself_passes(family: str, tmp_path: Path) -> None:
    from peft.helpers import update_forward_signature

    targets = ["c_attn", "c_fc"] if family == "gpt2" else ["q_proj", "o_proj"]
    model = tiny(family, num_hidden_layers=1, lora={"target_modules": targets})
    update_forward_signature(model)
    model.enable_input_require_grads()
    model(IDS, labels=IDS)
    trainer_of(model, tmp_path)


def hook(*_: Any) -> None:
    raise AssertionError("never run")


def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("never run")


def dispatched(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.model.layers[0], AlignDevicesHook())


def patched(path: str, **options: Any) -> Callable[[Any], None]:
    def patch(model: Any) -> None:
        module = model.get_submodule(path)
        module.forward = types.MethodType(scaled, module)

    return patch


REFUSED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "a hook on a layer": (
        lambda model: model.model.layers[0].register_forward_hook(hook),
        ["model.model.layers.0 has a forward hook, test_model_code.hook", "handle.remove()"],
    ),
    "a pre-hook on a projection": (
        lambda model: model.model.layers[0].mlp.up_proj.register_forward_pre_hook(hook),
        ["model.model.layers.0.mlp.up_proj has a forward pre-hook"],
    ),
    "a backward hook on attention": (
        lambda model: model.model.layers[0].self_attn.register_full_backward_hook(hook),
        ["model.model.layers.0.self_attn has a backward hook"],
    ),
    "a backward pre-hook on the model": (
        lambda model: model.register_full_backward_pre_hook(hook),
        ["model has a backward pre-hook"],
    ),
    "a hook on the embedding": (
        lambda model: model.get_input_embeddings().register_forward_hook(functools.partial(hook, 1)),
        ["model.model.embed_tokens has a forward hook, test_model_code.hook"],
    ),
    "a hook on a gradient": (
        lambda model: model.lm_head.weight.register_hook(hook),
        ["model.lm_head.weight has a hook on its gradient", "handle.remove()"],
    ),
    "a patched projection": (
        patched("model.layers.0.mlp.up_proj"),
        ["model.model.layers.0.mlp.up_proj.forward was replaced by test_model_code.scaled", "without the patch"],
    ),
    "a patched forward of the model": (
        lambda model: setattr(model, "forward", types.MethodType(scaled, model)),
        ["model.forward was replaced by test_model_code.scaled"],
    ),
    "layers over devices": (dispatched, ["model.model.layers.0 has a hook of Accelerate", "without device_map"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_never_run_is_refused(case: str, tmp_path: Path) -> None:
    model, (change, words) = small(), REFUSED[case]
    change(model)
    with pytest.raises(ValueError, match="would never run") as caught:
        trainer_of(model, tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_a_class_whose_loss_was_patched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger and others do."""
    before = LlamaForCausalLM.forward
    for replacement in (scaled, functools.wraps(before)(lambda *_: scaled(*_))):
        monkeypatch.setattr(LlamaForCausalLM, "forward", replacement)
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM\.forward was replaced by test_model_code\..*without the patch"
        ):
            trainer_of(small(), tmp_path)


def test_a_patch_that_cannot_be_derived_is_named(tmp_path: Path) -> None:
    model = small()
    patched("model.layers.0.mlp")(model)
    words = (
        r"cannot be derived: .*never run; model\.model\.layers\.0\.mlp\.forward was replaced by test_model_code\.scaled"
    )
    with pytest.raises(ValueError, match=words):
        trainer_of(model, tmp_path)


def test_all_are_named_up_to_a_few(tmp_path: Path) -> None:
    model = small()
    for module in model.model.layers[0].modules():
        module.register_forward_hook(hook)
    with pytest.raises(ValueError, match=r"and \d+ more"):
        trainer_of(model, tmp_path)


class SameName:
    """What a user may call a class of their own."""

    class LlamaForCausalLM(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            result.loss = result.loss * 100
            return result


class Unrelated:
    class LlamaForCausalLM(nn.Module):
        pass


class Longer(LlamaForCausalLM):
    """Adds a method, and nothing to the way from ids to a loss."""

    def length(self) -> int:
        return len(self.model.layers)


def test_classes_of_ones_own(tmp_path: Path) -> None:
    config = small().config
    with pytest.raises(ValueError, match=r"model is a test_model_code\.SameName\.LlamaForCausalLM with a forward"):
        trainer_of(SameName.LlamaForCausalLM(config), tmp_path)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not supported: it is neither .*adding_a_model"):
        trainer_of(Unrelated.LlamaForCausalLM(), tmp_path)


def test_models_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Linear is not supported: it is neither .*docs/adding_a_model\.md"):
        trainer_of(nn.Linear(2, 2), tmp_path)


def test_compiled_models(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ValueError, match=r"OptimizedModule is not supported: pass the model without torch\.compile"):
        trainer_of(torch.compile(model, backend="eager"), tmp_path)
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"model\.model\.layers\.0 was compiled"):
        trainer_of(model, tmp_path)


class Halved(nn.Module):
    """A norm of one's own, in the place of the model's."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: Any) -> Any:
        return 0.5 * self.given(x)


def test_what_is_called_is_honoured(tmp_path: Path) -> None:
    """Norms and activations run as they are: a class of one's own, a patch, a hook; and a subclass trains."""

    def change(model: Any) -> Any:
        layer = model.model.layers[0]
        layer.input_layernorm = Halved(layer.input_layernorm)
        layer.mlp.act_fn.register_forward_hook(lambda _, __, result: 2 * result)
        norm = model.model.norm
        norm.forward = lambda x: 0.25 * type(norm).forward(norm, x)
        return model

    plain = small()
    losses = []
    for helix in (None, {}):
        model = Longer(plain.config)
        model.load_state_dict(plain.state_dict())
        trainer = build(str(tmp_path), helix, {"max_steps": 2}, model=change(model), train_dataset=sequences(4))
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    trainer = trainer_of(plain, tmp_path)
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"] - losses[0][0]) > 1e-3


class Attention(modeling_llama.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 0.5 * output, weights


class MLP(nn.Module):
    """As Liger's: the same submodules, another forward."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.factor = 0.5
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (*given.children(),)

    def forward(self, x: Any) -> Any:
        return self.factor * self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))


def halved(self: Any, x: Any) -> Any:
    return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def change_instance(layer: Any, _: pytest.MonkeyPatch) -> None:
    layer.mlp.forward = types.MethodType(halved, layer.mlp)


def change_under_its_name(layer: Any, _: pytest.MonkeyPatch) -> None:
    before = layer.forward
    layer.forward = functools.wraps(before)(lambda x, *args, **kwargs: x + 0.5 * before(x, *args, **kwargs))


def change_class(layer: Any, patches: pytest.MonkeyPatch) -> None:
    patches.setattr(modeling_llama.LlamaMLP, "forward", halved)


def change_attention(layer: Any, _: pytest.MonkeyPatch) -> None:
    layer.self_attn.__class__ = Attention


def change_mlp(layer: Any, _: pytest.MonkeyPatch) -> None:
    layer.mlp = MLP(layer.mlp)


@pytest.mark.parametrize(
    "change", [slow(change_instance), slow(change_under_its_name), change_class, slow(change_attention), change_mlp]
)
def test_other_code_inside_a_declared_class_is_honoured(
    change: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model is derived from what it is, and trains as under the stock Trainer."""
    losses, plain = [], trainer_of(small(), tmp_path).evaluate(sequences(4))["eval_loss"]
    for helix in (None, {}):
        model = small()
        change(model.model.layers[0], monkeypatch)
        trainer = build(str(tmp_path), helix, {"max_steps": 2}, model=model, train_dataset=sequences(4))
        before = trainer.evaluate(sequences(4))["eval_loss"]
        trainer.train()
        losses.append([before, *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)])
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    assert abs(losses[0][0] - plain) > 1e-4


def test_patches_that_come_later(tmp_path: Path) -> None:
    for number, words in enumerate(("without the patch", "after it was traced: replace it before the trainer is made")):
        model = small(num_hidden_layers=2)
        for layer in model.model.layers[:number]:
            layer.mlp.forward = types.MethodType(halved, layer.mlp)
        trainer = trainer_of(model, tmp_path)
        model.model.layers[1].mlp.forward = types.MethodType(halved, model.model.layers[1].mlp)
        with pytest.raises(
            ValueError, match=rf"layers\.1\.mlp\.forward was replaced by test_model_code\.halved.*{words}"
        ):
            trainer.train()


def test_hooks_that_come_later(tmp_path: Path) -> None:
    trainer = trainer_of(small(), tmp_path)
    trainer.model.model.layers[0].register_forward_hook(hook)
    with pytest.raises(ValueError, match=r"model\.model\.layers\.0 has a forward hook"):
        trainer.train()
    with pytest.raises(ValueError, match=r"model\.model\.layers\.0 has a forward hook"):
        trainer.evaluate(sequences(2))


def test_noise_on_embeddings_is_known(tmp_path: Path) -> None:
    """The Trainer's own hook, which comes when training starts."""
    trainer_of(small(), tmp_path, neftune_noise_alpha=1.0).train()


def test_hooks_on_routers_run(tmp_path: Path) -> None:
    model = tiny("phimoe", num_hidden_layers=1)
    model.model.layers[0].mlp.router.register_forward_hook(hook)
    trainer_of(model, tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "phimoe", "qwen3_moe"])
def test_no_text_of_a_layer_has_an_address_of_memory(family: str) -> None:
    """Else a proof that is kept by the text would not be found again by another process."""
    model = tiny(family)
    texts = [description(layer) for layer in model.model.layers]
    assert not [found for text in texts for found in re.findall(r"\S+ \d{12,}\b", text)]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_with_equal_adapters_are_alike(family: str) -> None:
    """PEFT's modules keep their names, which have the index of the layer."""
    stock = tiny(family)
    kinds = len({description(layer) for layer in stock.model.layers})
    get_peft_model(stock, LoraConfig(r=2, target_modules="all-linear"))
    assert len({description(layer) for layer in stock.model.layers}) == kinds < len(stock.model.layers)


class Scaled(nn.Module):
    """A factor that the code reads of its configuration, or of a dictionary."""

    def __init__(self, factor: float, share: float = 1.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(factor=factor, other=object())
        self.shares = {"here": share}

    def forward(self, x: Any) -> Any:
        return x * self.config.factor * self.shares["here"]


def test_layers_whose_code_reads_other_numbers_are_not_alike() -> None:
    assert description(Scaled(1.0)) == description(Scaled(1.0))
    assert len({description(each) for each in (Scaled(1.0), Scaled(2.0), Scaled(1.0, 2.0))}) == 3
    closing = [nn.Identity(), nn.Identity()]
    for factor, module in enumerate(closing):
        module.forward = lambda x, factor=factor: factor * x
    assert description(closing[0]) != description(closing[1])


@pytest.mark.parametrize("name", ["LlamaModel", "Qwen2VLForConditionalGeneration"])
def test_a_derived_family_does_not_keep_its_model(name: str) -> None:
    """Of a model that is its own decoder, and of a model with towers; a copy has a family of its own."""
    model = getattr(transformers, name)(default_config(name))
    family = family_of(model)
    assert family_of(model) is family
    assert family_of(copy.deepcopy(model)) is not family
    alive = weakref.ref(model)
    del model, family
    gc.collect()
    assert alive() is None
