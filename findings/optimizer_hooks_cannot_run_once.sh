#!/usr/bin/env bash
# A hook of an optimizer that removes itself raises an error once there is another hook; hooks of modules and tensors do not.
#
# Versions: torch 2.13.0, CPU.
# Input: hooks that run once, `handle.remove()` as their last line, on a module, a tensor and an optimizer, each alone and
# with a second hook.
# Expected: the hook runs once, the other one each time. Hooks of modules and tensors do that.
# Seen: alone it works on an optimizer as well. With a second hook, `optimizer.step()`, `state_dict()` and
# `load_state_dict()` raise "OrderedDict mutated during iteration": the hooks are iterated over without a copy. After the
# error of a post hook the weights have been stepped, after that of a pre hook they have not. The hooks of all optimizers
# (`register_optimizer_step_pre_hook`) count among the others, so hooks of two libraries meet here. A handle that the
# garbage collector removes while hooks run has the same effect.
#
#     module, pre hook, second hook: once other
#     tensor, second hook: once other
#     optimizer, pre hook, alone: once, weight -1
#     optimizer, pre hook, second hook: once RuntimeError: OrderedDict mutated during iteration, weight 0
#     optimizer, post hook, second hook: once RuntimeError: OrderedDict mutated during iteration, weight -1
#     all optimizers, pre hook, second hook: once RuntimeError: OrderedDict mutated during iteration, weight 0
#     optimizer, state_dict pre hook, second hook: once RuntimeError: OrderedDict mutated during iteration
#
# Fails if this changes. hf_helix keeps a single hook, and never removes it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


def run(register, act, has_other):
    said = []

    def once(*given):
        said.append("once")
        handle.remove()

    handle = register(once)
    other = register(lambda *given: said.append("other")) if has_other else None
    try:
        act()
    except RuntimeError as error:
        said.append(f"RuntimeError: {error}")
    if other is not None:
        other.remove()
    return " ".join(said)


linear, weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)


def stepped(register, has_other):
    weight.data.zero_()
    weight.grad = torch.ones(1)
    return f"{run(register, optimizer.step, has_other)}, weight {weight.item():.0f}"


called = run(linear.register_forward_pre_hook, lambda: linear(torch.ones(2)), True)
print("module, pre hook, second hook:", called)
print("tensor, second hook:", run(weight.register_hook, lambda: weight.sum().backward(), True))
print("optimizer, pre hook, alone:", stepped(optimizer.register_step_pre_hook, False))
print("optimizer, pre hook, second hook:", stepped(optimizer.register_step_pre_hook, True))
print("optimizer, post hook, second hook:", stepped(optimizer.register_step_post_hook, True))
print("all optimizers, pre hook, second hook:", stepped(register_optimizer_step_pre_hook, True))
saved = run(optimizer.register_state_dict_pre_hook, optimizer.state_dict, True)
print("optimizer, state_dict pre hook, second hook:", saved)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>> "$folder/errors" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
module, pre hook, second hook: once other
tensor, second hook: once other
optimizer, pre hook, alone: once, weight -1
optimizer, pre hook, second hook: once RuntimeError: OrderedDict mutated during iteration, weight 0
optimizer, post hook, second hook: once RuntimeError: OrderedDict mutated during iteration, weight -1
all optimizers, pre hook, second hook: once RuntimeError: OrderedDict mutated during iteration, weight 0
optimizer, state_dict pre hook, second hook: once RuntimeError: OrderedDict mutated during iteration
SEEN
