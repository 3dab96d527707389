"""What scripts do with the parameters of a trainer's model: read and write weights and gradients.

Each reading returns a number or several, and each writing leaves other weights or gradients. A job does all of them one
after the other, under the stock Trainer and on a cut model alike, and returns what was seen.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from support.jobs import build
from support.models import sequences, tiny
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector
from transformers import TrainerCallback

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
    "rows": lambda model: [row.norm().item() for row in _named(model, TABLE).grad],
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


def state_of(model: Any) -> list[float]:
    """Two numbers of every weight and gradient, which depend on where its elements lie."""
    result = []
    for parameter in model.parameters():
        for value in (parameter, parameter.grad):
            full = value.detach().double().cpu() * torch.linspace(1, 2, value.numel(), dtype=torch.double).view(
                value.shape
            )
            result += [full.sum().item(), full.abs().sum().item()]
    return result


def look(folder: str, helix: dict[str, Any] | None, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """What every reading sees after a window, and what every writing leaves."""
    made = tiny(**(model or {"num_hidden_layers": 4}))
    trainer = build(folder, helix, {"per_device_train_batch_size": 2}, model=made, train_dataset=sequences(8))
    trainer.current_gradient_accumulation_steps = 1
    batch = {key: torch.stack([row[key] for row in sequences(2)]) for key in sequences(1)[0]}
    trainer.training_step(trainer.model, batch)
    seen: dict[str, Any] = {}
    for name, reading in READINGS.items():
        seen[name] = _tried(reading, trainer.model)
    for name, writing in WRITINGS.items():
        error = _tried(writing, trainer.model)
        seen[name] = error if isinstance(error, str) else state_of(trainer.model)
    trainer.model.zero_grad()
    seen["no gradients"] = [parameter.grad is None for parameter in trainer.model.parameters()]
    trainer.training_step(trainer.model, batch)
    seen["trained on"] = state_of(trainer.model)
    return seen


def _tried(act: Any, model: Any) -> Any:
    try:
        return act(model)
    except Exception as error:
        import traceback

        return f"{type(error).__name__}: {error}" + traceback.format_exc()[-1500:]


# -- what a callback changes in the middle of a run -----------------------------------------------------------------


def scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.1


def drop(model: Any) -> None:
    model.model.layers[0].self_attn.attention_dropout = 0.9


def weigh_routers(model: Any) -> None:
    model.router_aux_loss_coef = 0.5


def set_config(model: Any) -> None:
    model.config.rms_norm_eps = 1.0
    model.config.attention_dropout = 0.5


def add_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def add_module(model: Any) -> None:
    model.model.layers[0].mlp.extra = nn.Linear(2, 2)


def replace_module(model: Any) -> None:
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


def resize(model: Any) -> None:
    model.resize_token_embeddings(140)


def soften_norms(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def freeze(model: Any) -> None:
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad = False


def soften_adapters(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] *= 3


def merge_adapters(model: Any) -> None:
    model.merge_adapter()


CHANGES: dict[str, Any] = {
    "merge_adapters": merge_adapters,
    "scale": scale,
    "drop": drop,
    "weigh_routers": weigh_routers,
    "set_config": set_config,
    "add_hook": add_hook,
    "add_module": add_module,
    "replace_module": replace_module,
    "resize": resize,
    "soften_norms": soften_norms,
    "freeze": freeze,
    "soften_adapters": soften_adapters,
}


class Changes(TrainerCallback):
    """Changes the model after the first step."""

    def __init__(self, name: str) -> None:
        self.change = CHANGES[name]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.change(model)


def change(folder: str, helix: dict[str, Any] | None, name: str) -> Any:
    """The losses of a run whose model a callback changes; the error where the run is ended."""
    options: dict[str, Any] = {"num_hidden_layers": 4}
    if name == "weigh_routers":
        options |= {"family": "mixtral", "output_router_logits": True}
    if name in ("soften_adapters", "merge_adapters"):
        options |= {"lora": {}}
    training = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2, "optim": "sgd"}
    made = tiny(**options)
    trainer = build(folder, helix, training, model=made, train_dataset=sequences(8), callbacks=[Changes(name)])
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- a full weight and a full gradient ------------------------------------------------------------------------------


def write_full(folder: str, helix: dict[str, Any] | None) -> list[float]:
    """The state after a script has written a gradient and a weight by name, and read them again."""
    trainer: Any = build(folder, helix, {}, model=tiny(num_hidden_layers=4), train_dataset=sequences(8))
    trainer.current_gradient_accumulation_steps = 1
    batch = {key: torch.stack([row[key] for row in sequences(2)]) for key in sequences(1)[0]}
    trainer.training_step(trainer.model, batch)
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
