#!/usr/bin/env bash
# PEFT's DoRA with dropout loses a part of the gradient of a trained base weight if the base is a Conv1D (GPT-2).
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0, CPU.
# Input: one weight as nn.Linear and as the Conv1D of Transformers (fan_in_fan_out=True), the same DoRA adapter, the base
# trained as well (requires_grad_), with and without lora_dropout.
# Expected: the same outputs, and the same gradient of the base weight, transposed.
# Seen: the outputs are the same. With dropout, the gradient of the Conv1D lacks what comes through the scaled product: the
# weight is transposed into a new nn.Parameter, which has no edge to the old one. There is no warning. At the begin of a
# training the part is zero, since the magnitudes equal the norms; it grows as they move apart.
#
#     dropout 0.0: outputs equal, gradients of the base equal
#     dropout 0.5: outputs equal, gradients of the base differ
#
# Fails if this changes. hf_helix gives the complete gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > "$folder/run.py" <<'PYTHON'
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.pytorch_utils import Conv1D


def run(is_linear, dropout):
    torch.manual_seed(0)
    weight, rows = torch.randn(6, 4), torch.randn(8, 4)
    model = nn.ModuleDict({"layer": nn.Linear(4, 6, bias=False) if is_linear else Conv1D(6, 4)})
    options = {"lora_dropout": dropout, "fan_in_fan_out": not is_linear, "init_lora_weights": False}
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["layer"], use_dora=True, **options), model)
    adapted = model["layer"]
    base = adapted.base_layer.weight.requires_grad_(True)
    with torch.no_grad():
        base.copy_(weight if is_linear else weight.T)
        adapted.lora_A["default"].weight.copy_(torch.linspace(-1, 1, 8).view(2, 4))
        adapted.lora_B["default"].weight.copy_(torch.linspace(1, -1, 12).view(6, 2))
        adapted.lora_magnitude_vector["default"].weight.copy_(torch.linspace(1, 4, 6))
    torch.manual_seed(1)
    out = adapted(rows)
    out.square().sum().backward()
    return out.detach(), base.grad if is_linear else base.grad.T


def verdict(one, other):
    return "equal" if (one - other).norm() <= 1e-5 * one.norm() else "differ"


for dropout in (0.0, 0.5):
    (out, gradient), (same_out, other) = (run(is_linear, dropout) for is_linear in (True, False))
    print(f"dropout {dropout}: outputs {verdict(out, same_out)}, gradients of the base {verdict(gradient, other)}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>> "$folder/errors" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
dropout 0.0: outputs equal, gradients of the base equal
dropout 0.5: outputs equal, gradients of the base differ
SEEN
