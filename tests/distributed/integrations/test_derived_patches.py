"""Code in the place of a derived model's own is what is traced, and so what is trained; or it is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invariant.classes import Case
from invariant.harness import check
from support.derived_models import PATCHES, gemma2
from support.jobs import build
from support.marks import slow
from support.models import sequences
from support.parity import unsplit
from transformers.models.gemma2 import modeling_gemma2

MODEL = {"family": "support.derived_models:patched", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("patch", "layout"),
    [("instance", ""), *(slow(*case) for case in (("number", ""), *((p, "tp2") for p in PATCHES)))],
)
def test_patches_are_honoured(patch: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    plain = unsplit({"family": "support.derived_models:gemma2", "num_hidden_layers": 2}, 3, "dense")
    model = {**MODEL, "patch": patch}
    assert abs(unsplit(model, 3, "dense")["losses"][0] - plain["losses"][0]) > 1e-4
    check(cluster_of, tmp_path, Case(patch, model, layout, "dense"), ("greedy",))


@pytest.mark.slow
def test_a_patch_of_a_declared_class_is_honoured(cluster_of: Any, tmp_path: Path) -> None:
    model = {"family": "support.derived_models:patched_llama", "num_hidden_layers": 2}
    check(cluster_of, tmp_path, Case("patched llama", model, "tp2", "dense"), ("greedy",))


def hook(*_: Any) -> None:
    raise AssertionError("never run")


def dispatched(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.model.layers[0], AlignDevicesHook())


def wrapped(path: str) -> Callable[[Any], None]:
    def patch(model: Any) -> None:
        module = model.get_submodule(path)
        before = module.forward
        module.forward = lambda *args, **kwargs: before(*args, **kwargs)

    return patch


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a hook on a layer": (
        lambda model: model.model.layers[0].register_forward_hook(hook),
        r"model\.model\.layers\.0 has a forward hook, .*hook: remove it",
    ),
    "a hook on a projection": (
        lambda model: model.model.layers[0].mlp.up_proj.register_forward_pre_hook(hook),
        r"layers\.0\.mlp\.up_proj has a forward pre-hook",
    ),
    "a hook on the decoder": (
        lambda model: model.model.register_forward_hook(hook),
        r"model\.model has a forward hook",
    ),
    "a hook on the embedding": (
        lambda model: model.model.embed_tokens.register_forward_hook(hook),
        r"model\.model\.embed_tokens has a forward hook",
    ),
    "a patched projection": (
        wrapped("model.layers.0.mlp.up_proj"),
        r"model\.model\.layers\.0\.mlp\.up_proj\.forward was replaced by",
    ),
    "a patched model, which computes the loss": (wrapped(""), r"model\.forward was replaced by"),
    "layers over devices": (dispatched, r"model\.model\.layers\.0 has a hook of Accelerate .*without device_map"),
    "a compiled layer": (
        lambda model: model.model.layers[0].compile(backend="eager"),
        r"model\.model\.layers\.0 was compiled",
    ),
}
OTHER_PLACES = ("a hook on the decoder", "a hook on the embedding")


@pytest.mark.parametrize("case", [slow(case, when=case in OTHER_PLACES) for case in REFUSED])
def test_what_would_never_run_is_refused(case: str, tmp_path: Path) -> None:
    model, (change, words) = gemma2(num_hidden_layers=1), REFUSED[case]
    change(model)
    with pytest.raises(ValueError, match=rf"(?s){words}"):
        trainer_of(model, tmp_path)


def test_what_transformers_sets_itself_passes(tmp_path: Path) -> None:
    model = gemma2(num_hidden_layers=1)
    ids = sequences(1)[0]["input_ids"].unsqueeze(0)
    model(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    trainer_of(model, tmp_path)


def test_a_patched_class_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(self: Any, x: Any) -> Any:
        return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(modeling_gemma2.Gemma2MLP, "forward", halved)
    trainer = trainer_of(gemma2(num_hidden_layers=1), tmp_path)
    row = sequences(2)[0]
    loss = gemma2(num_hidden_layers=1)(row["input_ids"][None], labels=row["labels"][None]).loss.item()
    assert trainer.evaluate([row])["eval_loss"] == pytest.approx(loss, abs=1e-5)


def trainer_of(model: Any, folder: Path) -> Any:
    return build(str(folder), {}, {"max_steps": 1}, model=model, train_dataset=sequences(4))
