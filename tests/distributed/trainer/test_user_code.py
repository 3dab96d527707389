"""What scripts do to a trainer's model is right in every layout, or an error that names it. Stock is the oracle."""

import contextlib
import copy
import functools
import io
import json
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from support.comparisons import is_close
from support.jobs import build
from support.marks import slow
from support.models import sequences, tiny
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector
from transformers import AutoModelForCausalLM, TrainerCallback

# -- what the ranks run ------------------------------------------------------------------------------------------------


@torch.no_grad()
def averaged(trainer: Any) -> None:
    mean = copy.deepcopy(trainer.model)
    for parameter in mean.parameters():
        parameter.mul_(0.9)
    trainer.model = mean


@torch.no_grad()
def edited(trainer: Any) -> None:
    table = trainer.model.get_input_embeddings().weight
    table[90:] = table[:90].mean(0)


def resized(trainer: Any) -> None:
    torch.manual_seed(3)
    trainer.model.resize_token_embeddings(140)


def shortened(trainer: Any) -> None:
    trainer.model.model.layers = trainer.model.model.layers[:2]
    trainer.model.config.num_hidden_layers = 2


@torch.no_grad()
def replaced(trainer: Any) -> None:
    head = trainer.model.lm_head
    trainer.model.lm_head = nn.Linear(head.in_features, head.out_features, bias=False)
    trainer.model.lm_head.weight.copy_(head.weight * 2)


def given(trainer: Any) -> None:
    """A script gives the values to save."""
    state = {name: 2 * value.cpu() for name, value in trainer.model.state_dict().items()}
    trainer.save_model = lambda folder: trainer._save(folder, state_dict=state)


KINDS: dict[str, Any] = {
    "given": given,
    "merged": lambda trainer: setattr(trainer, "model", trainer.model.merge_and_unload()),
    "averaged": averaged,
    "edited": edited,
    "resized": resized,
    "shortened": shortened,
    "replaced": replaced,
    "converted": lambda trainer: trainer.model.to(torch.bfloat16),
    "adapters": lambda trainer: None,
}


def save(folder: str, helix: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """What is in the files that are written after a few steps and a change, and the loss of what they load as."""
    lora = {} if kind in ("merged", "adapters") else None
    made = tiny(num_hidden_layers=4, lora=lora, tie_word_embeddings=kind == "resized")
    training = {"max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 2}
    trainer = build(folder, helix, training, model=made, train_dataset=sequences(8))
    trainer.train()
    KINDS[kind](trainer)
    out = Path(folder, "out")
    trainer.save_model(str(out))
    if dist.is_initialized():
        dist.barrier()
    tensors: dict[str, Any] = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    config = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {}
    base = tiny(num_hidden_layers=4) if lora is not None and not config else None
    loaded: Any = (
        PeftModel.from_pretrained(base, str(out)) if base is not None else AutoModelForCausalLM.from_pretrained(out)
    )
    ids = torch.stack([row["input_ids"] for row in sequences(2, seed=5)])
    with torch.no_grad():
        loss = loaded.float()(input_ids=ids, labels=ids).loss.item()
    return {
        "files": sorted(path.name for path in out.iterdir() if path.name != "README.md"),
        "shapes": {key: [list(value.shape), str(value.dtype)] for key, value in tensors.items()},
        "sums": [float(value.double().abs().sum()) for _, value in sorted(tensors.items())],
        "config": {key: config.get(key) for key in ("vocab_size", "num_hidden_layers", "dtype", "architectures")},
        "loss": loss,
    }


TABLE, CUT, NORM = "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"
ROWS = "model.layers.0.mlp.down_proj.weight"  # cut by columns


def number(value: Any) -> float:
    return float(torch.as_tensor(value).double().sum())


def _named(model: Any, name: str) -> Any:
    return next(p for key, p in model.named_parameters() if key.endswith(name))


def each(function: Any) -> Any:
    """A reading of a few parameters that are cut in different ways."""
    return lambda model: [number(function(_named(model, name))) for name in (TABLE, CUT, ROWS, NORM)]


READINGS: dict[str, Any] = {
    "shapes": lambda model: [list(p.shape) for p in model.parameters()],
    "counts": lambda model: sum(p.numel() for p in model.parameters() if p.requires_grad),
    "num_parameters": lambda model: model.num_parameters(only_trainable=True),
    "norms": lambda model: [p.norm().item() for p in model.parameters()],
    "gradient norms": lambda model: [p.grad.detach().data.norm(2).item() for p in model.parameters()],
    "1-norms": lambda model: [torch.linalg.vector_norm(p.grad, 1).item() for p in model.parameters()],
    "total norm": lambda model: get_total_norm([p.grad for p in model.parameters()]).item(),
    "largest": lambda model: [p.grad.abs().max().item() for p in model.parameters()],
    "means": each(lambda p: p.mean()),
    "deviations": each(lambda p: p.std()),
    "squares": each(lambda p: (p.detach() ** 2).sum()),
    "ratio": each(lambda p: p.grad.norm() / p.norm()),
    "any": each(lambda p: torch.isnan(p.grad).any()),
    "all": each(lambda p: torch.isfinite(p.data).all()),
    "zeros": lambda model: (_named(model, TABLE).grad == 0).all(dim=1).sum().item(),
    "zeros of all": each(lambda p: (p.grad == 0).sum()),
    "rows": lambda model: [row.norm().item() for row in _named(model, TABLE).grad[:9]],
    "row": lambda model: _named(model, TABLE)[3].tolist(),
    "column": lambda model: _named(model, ROWS)[:, 5].norm().item(),
    "element": lambda model: _named(model, CUT)[2, 3].item(),
    "by dimension": lambda model: _named(model, CUT).norm(dim=1).tolist(),
    "product": lambda model: number(_named(model, CUT) @ _named(model, CUT).T),
    "cosine": lambda model: nn.functional.cosine_similarity(
        _named(model, ROWS).flatten(), _named(model, ROWS).grad.flatten(), dim=0
    ).item(),
    "vector": lambda model: parameters_to_vector(model.parameters()).abs().sum().item(),
    "numpy": lambda model: float(abs(_named(model, CUT).detach().cpu().numpy()).sum()),
    "chunks": lambda model: [number(part) for part in _named(model, CUT).chunk(3)],
    "types": each(lambda p: p.grad.type(torch.float64).norm() + p.data.type(torch.DoubleTensor).norm()),
    "bfloat16": each(lambda p: p.to(torch.bfloat16).float().norm()),
    "trained": lambda model: [p.requires_grad for p in model.parameters()],
    "pickled": lambda model: number(_saved(_named(model, CUT))),
    "state": lambda model: [number(value.abs()) for value in model.state_dict().values()],
}


def _saved(value: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def mask_rows(model: Any) -> None:
    _named(model, TABLE).grad[:7] = 0


def scale_rows(model: Any) -> None:
    _named(model, TABLE).grad[40:90] *= 0.5
    _named(model, ROWS).grad[:, 3:9].mul_(2)
    _named(model, CUT).grad[2].zero_()


def mask(model: Any) -> None:
    parameter = _named(model, CUT)
    parameter.grad.mul_((torch.arange(parameter.shape[1]) % 3 == 0).float())
    parameter.grad[parameter.grad > 0.01] = 0.01
    parameter.grad.masked_fill_(torch.ones(parameter.shape).tril().bool(), 0.5)


def noise(model: Any) -> None:
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


def assign(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone() * 2
        parameter.grad += 0.1 * parameter.data
    _named(model, ROWS).grad = torch.ones(_named(model, ROWS).shape)


@torch.no_grad()
def edit(model: Any) -> None:
    table = model.get_input_embeddings().weight
    table[90:] = table[:90].mean(0)
    table[5] = table[6]
    table.data[1:3] += 0.25
    _named(model, NORM).mul_(1.5)
    _named(model, CUT).data = _named(model, CUT).data * 0.5
    _named(model, ROWS).data.copy_(torch.arange(_named(model, ROWS).numel()).view(_named(model, ROWS).shape) / 1e4)


def initialize(model: Any) -> None:
    torch.manual_seed(4)
    nn.init.normal_(_named(model, CUT), std=0.02)
    nn.init.orthogonal_(_named(model, ROWS))
    with torch.no_grad():
        _named(model, TABLE).uniform_(-0.1, 0.1)


@torch.no_grad()
def average(model: Any) -> None:
    copied = copy.deepcopy(model)
    for mean, parameter in zip(copied.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter * 2, 0.1)
    for mean, parameter in zip(copied.parameters(), model.parameters(), strict=True):
        parameter.copy_(mean)
    torch._foreach_lerp_(list(model.parameters()), list(copied.parameters()), 0.5)


def load(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[next(key for key in state if key.endswith(CUT))] *= 2
    model.load_state_dict(state)


def step(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def decay(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.01 * parameter.data.sign()
        parameter.data.clamp_(-0.3, 0.3)


def swap(model: Any) -> None:
    """Other weights for a while, as for an evaluation of their average."""
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
        parameter.grad *= 1.5


def foreach(model: Any) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    torch._foreach_addcmul_(gradients, gradients, gradients, 0.5)
    torch._foreach_maximum_(gradients, -0.1)
    torch._foreach_mul_(gradients, torch._foreach_pow(2.0, torch._foreach_norm(gradients, ord=2)))


WRITINGS: dict[str, Any] = {
    "swap": swap,
    "foreach": foreach,
    "clip": lambda model: clip_grad_norm_(model.parameters(), 0.5),
    "clip a layer": lambda model: clip_grad_norm_(
        [p for n, p in model.named_parameters() if ".1." in n], 0.1, norm_type=1
    ),
    "clip by the largest": lambda model: clip_grad_norm_(model.parameters(), 0.01, norm_type=torch.inf),
    "clip values": lambda model: clip_grad_value_(model.parameters(), 0.003),
    "mask rows": mask_rows,
    "scale rows": scale_rows,
    "mask": mask,
    "noise": noise,
    "assign": assign,
    "edit": edit,
    "step": step,
    "decay": decay,
    "average": average,
    "load": load,
    "initialize": initialize,
    "zero": lambda model: [p.grad.zero_() for p in model.parameters()],
}


def state_of(model: Any, whole: bool = False) -> list[float]:
    """Two numbers of weights and gradients, which depend on where their elements lie. Each number takes messages: the
    first layer, and one weight of the next, which is on another rank of a pipeline, stand for all, unless `whole`."""
    result = []
    for name, parameter in model.named_parameters():
        if not whole and name.startswith("model.layers.") and not name.startswith("model.layers.0.") and name != CUT:
            continue
        for value in (parameter, parameter.grad):
            full = value.detach().double().cpu() * torch.linspace(1, 2, value.numel(), dtype=torch.double).view(
                value.shape
            )
            result += [full.sum().item(), full.abs().sum().item()]
    return result


BATCH = {key: torch.stack([row[key] for row in sequences(2)]) for key in sequences(1)[0]}


def stepped(folder: str, helix: dict[str, Any] | None, model: dict[str, Any] | None = None) -> Any:
    """A trainer after the window of one batch."""
    made = tiny(**(model or {"num_hidden_layers": 4}))
    trainer = build(folder, helix, {"per_device_train_batch_size": 2}, model=made, train_dataset=sequences(8))
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, BATCH)
    return trainer


EVERY = (*READINGS, *WRITINGS)
SOME = ("norms", "gradient norms", "rows", "column", "product", "state", "clip", "scale rows", "assign", "edit", "load")


def look(
    folder: str, helix: dict[str, Any] | None, names: Sequence[str] = EVERY, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What readings see after a window, and what writings leave."""
    trainer = stepped(folder, helix, model)
    seen = {name: _tried(READINGS[name], trainer.model) for name in names if name in READINGS}
    for name in (name for name in names if name in WRITINGS):
        error = _tried(WRITINGS[name], trainer.model)
        seen[name] = error if isinstance(error, str) else state_of(trainer.model)
    trainer.model.zero_grad()
    seen["no gradients"] = [parameter.grad is None for parameter in trainer.model.parameters()]
    trainer.training_step(trainer.model, BATCH)
    seen["trained on"] = state_of(trainer.model, whole=True)
    return seen


def _tried(act: Any, model: Any) -> Any:
    try:
        return act(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}" + traceback.format_exc()[-1500:]


# -- what a callback changes in the middle of a run -----------------------------------------------------------------


def change_attribute(path: str, value: Any) -> Any:
    """A change of an attribute of the model's."""
    *parents, name = path.split(".")
    return lambda model: setattr(functools.reduce(getattr, parents, model), name, value)


def replace_head(model: Any) -> None:
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


def soften_norms(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def soften_adapters(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 3


CHANGES: dict[str, tuple[Any, str]] = {
    "merge_adapters": (lambda model: model.merge_adapter(), "has merged its adapters"),
    "scale": (change_attribute("model.layers.0.self_attn.scaling", 0.1), "model.layers.0.self_attn.scaling was 0.35"),
    "drop": (
        change_attribute("model.layers.0.self_attn.attention_dropout", 0.9),
        "model.layers.0.self_attn.attention_dropout was 0.0 and is 0.9",
    ),
    "weigh_routers": (change_attribute("router_aux_loss_coef", 0.5), "router_aux_loss_coef was "),
    "set_config": (change_attribute("config.rms_norm_eps", 1.0), "config."),
    "add_hook": (
        lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None),
        "model.layers.0.mlp has a forward hook",
    ),
    "add_module": (
        lambda model: setattr(model.model.layers[0].mlp, "extra", nn.Linear(2, 2)),
        "model.layers.0.mlp has got a module or parameter",
    ),
    "replace_module": (replace_head, "lm_head was replaced or removed"),
    "resize": (lambda model: model.resize_token_embeddings(140), "was 131 and is 140"),
    "soften_norms": (soften_norms, ""),
    "freeze": (lambda model: model.model.layers[1].requires_grad_(False), ""),
    "soften_adapters": (soften_adapters, ""),
}
"""With the words of the error; "" for what is followed."""


class Changes(TrainerCallback):
    """Changes the model after the first step."""

    def __init__(self, name: str) -> None:
        self.change, _ = CHANGES[name]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.change(model)


def change(folder: str, helix: dict[str, Any] | None, name: str, layers: int = 2) -> Any:
    """The losses of a run whose model a callback changes; the error where the run is ended."""
    options: dict[str, Any] = {"num_hidden_layers": layers}
    if name == "weigh_routers":
        options |= {"family": "phimoe", "output_router_logits": True}
    if name in ("soften_adapters", "merge_adapters"):
        options |= {"lora": {}}
    training = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "optim": "sgd"}
    made = tiny(**options)
    trainer = build(folder, helix, training, model=made, train_dataset=sequences(8), callbacks=[Changes(name)])
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def said(folder: str, helix: dict[str, Any], name: str) -> str:
    """What a run says whose model a callback changes."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        change(folder, helix, name)
    return output.getvalue()


class Stops(TrainerCallback):
    """Stops a run inside an optimizer step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


# -- a full weight and a full gradient ------------------------------------------------------------------------------


def write_full(folder: str, helix: dict[str, Any] | None) -> list[float]:
    """The state after a script has written a gradient and a weight by name, and read them again."""
    trainer = stepped(folder, helix)
    table = _named(trainer.model, TABLE)
    if helix is None:
        table.grad[:5] = 2.0
        table.data[:5] += table.grad[:5]
    else:
        name = next(key for key, value in trainer.model.named_parameters() if value is table)
        with trainer.helix.full_gradient(name) as gradient, trainer.helix.full_weight(name) as weight:
            gradient[:5] = 2.0
            weight[:5] += gradient[:5]
    return state_of(trainer.model)


# -- the tests --------------------------------------------------------------------------------------------------------

SAVED = [
    *((kind, "tp2") for kind in ("given", "merged", "averaged", "resized", "shortened", "replaced", "converted")),
    *((kind, "shard_parameters") for kind in ("edited", "converted")),
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
    "shard_parameters": (2, {"shard_parameters": True}),
    "shard_optimizer": (2, {"shard_optimizer": True}),
    "cp2": (2, {"cp_size": 2}),
    "pp2 offload": (2, {"pp_size": 2, "offload": "optimizer"}),
    "tp2 pp2": (4, {"pp_size": 2, "tp_size": 2}),
    "tp2 shard_parameters": (4, {"tp_size": 2, "shard_parameters": True}),
    "pp2 shard_optimizer": (4, {"pp_size": 2, "shard_optimizer": True}),
    "cp2 shard_parameters": (4, {"cp_size": 2, "shard_parameters": True}),
}


def differences(expected: dict[str, Any], seen: dict[str, Any], tolerance: float = 2e-5) -> dict[str, Any]:
    return {name: (value, seen[name]) for name, value in expected.items() if not is_close(value, seen[name], tolerance)}


def test_the_oracle_sees_something(stock: Any) -> None:
    expected, _ = stock(look, names=EVERY, model={"num_hidden_layers": 2})
    assert not {name: value for name, value in expected.items() if isinstance(value, str)}
    states = [expected[name] for name in WRITINGS]
    assert all(before != after for before, after in pairwise(states))


@pytest.mark.parametrize(
    ("layout", "names"),
    [("tp2", EVERY), slow("pp2", SOME), ("shard_parameters", SOME)]
    + [slow(layout, EVERY) for layout in LAYOUTS if "2 " in layout or layout == "cp2"],
)
def test_parameters_are_read_and_written_whole(
    layout: str, names: Sequence[str], cluster_of: Any, tmp_path: Path, stock: Any
) -> None:
    ranks, helix = LAYOUTS[layout]
    job = {"names": names, "model": {"num_hidden_layers": 2 * helix.get("pp_size", 1)}}
    for seen in cluster_of(ranks).run(look, folder=str(tmp_path), helix=helix, **job):
        assert not differences(stock(look, **job)[0], seen)


@pytest.mark.slow
def test_experts_are_read_and_written_whole(cluster_of: Any, tmp_path: Path) -> None:
    model = {"family": "mixtral", "num_hidden_layers": 4}
    stock = look(str(tmp_path), None, model=model)
    helix = {"ep_size": 2, "tp_size": 2, "shard_parameters": True}
    for seen in cluster_of(4).run(look, folder=str(tmp_path), helix=helix, model=model):
        assert not differences(stock, seen, 1e-4)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*SAVED, *(slow(kind, layout) for kind in KINDS for layout in ("pp2", "tp2 shard_parameters"))]
    + [slow("edited", layout) for layout in ("tp2", "pp2 offload", "tp2 pp2", "pp2 shard_optimizer")]
    + [slow("adapters", layout) for layout in ("tp2", "shard_parameters", "cp2 shard_parameters")],
)
def test_what_is_saved_is_what_the_trainer_holds(kind: str, layout: str, cluster_of: Any, tmp_path: Path) -> None:
    ranks, helix = LAYOUTS[layout]
    dp = 2 if {"shard_parameters", "shard_optimizer"} & helix.keys() else 1
    job = {"folder": str(tmp_path / "stock"), "helix": None, "kind": kind}
    stock = save(**job) if dp == 1 else cluster_of(2).run(save, **job)[0]
    results = cluster_of(ranks).attempt(save, folder=str(tmp_path / "cut"), helix=helix, kind=kind)
    for result in results:
        if kind == "converted" and (dp == 2 or "offload" in helix):
            assert "cannot be converted; save the model, and convert it with from_pretrained" in result.message
        else:
            assert isinstance(result, dict), result
            assert not differences(stock, result, 1e-4)


@pytest.mark.parametrize(
    ("layout", "names"),
    [("tp2", CHANGES), ("shard_parameters", ("freeze", "set_config"))]
    + [slow(layout, CHANGES) for layout in ("pp2", "shard_optimizer", "cp2", "tp2 pp2")],
)
def test_changes_of_the_model_are_followed_or_refused(
    layout: str, names: Sequence[str], cluster_of: Any, tmp_path: Path
) -> None:
    ranks, helix = LAYOUTS[layout]
    for name in names:
        words = CHANGES[name][1]
        job = {"folder": str(tmp_path), "name": name, "layers": 2 * helix.get("pp_size", 1)}
        stock: Any = None  # which DDP may refuse in its own words
        if not words and "shard" in layout:
            stock = cluster_of(2).run(change, helix=None, **job)[0]
        elif not words:
            stock = change(helix=None, **job)
        for result in cluster_of(ranks).run(change, helix=helix, **job):
            assert words in result if words else is_close(stock, result, 1e-4), (name, stock, result)


QUICK = {"tp2", "pp2", "shard_parameters"}  # shards of an optimizer are shards of the same flat parameters


@pytest.mark.parametrize("layout", [slow(name, when=name not in QUICK) for name in LAYOUTS])
def test_a_full_weight_and_a_full_gradient(layout: str, cluster_of: Any, tmp_path: Path) -> None:
    ranks, helix = LAYOUTS[layout]
    stock = write_full(str(tmp_path), None)
    for result in cluster_of(ranks).run(write_full, folder=str(tmp_path), helix=helix):
        assert is_close(stock, result, 2e-5)


def test_gradients_that_are_no_longer_reduced_early_are_said(cluster_of: Any, tmp_path: Path) -> None:
    texts = cluster_of(2).run(said, folder=str(tmp_path), helix={"plan": "greedy"}, name="freeze")
    assert "parameters were frozen or unfrozen after the model was cut" in texts[0]


@pytest.mark.parametrize("stops", [True, False])
def test_a_step_behind_a_run(stops: bool, tmp_path: Path) -> None:
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 1}
    data: dict[str, Any] = {"train_dataset": sequences(8), "callbacks": [Stops()] if stops else []}
    trainer = build(str(tmp_path), {}, training, model=tiny(num_hidden_layers=2), **data)
    trainer.train()
    trainer.model.zero_grad()
    assert trainer.training_step(trainer.model, BATCH) > 0
    assert trainer.model.lm_head.weight.grad.abs().sum() > 0
