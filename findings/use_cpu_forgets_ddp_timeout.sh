#!/usr/bin/env bash
# TrainingArguments(use_cpu=True, ddp_timeout=...): the process group keeps torch's half hour.
#
# Versions: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0, gloo, CPU.
# Input: two processes that make TrainingArguments with ddp_timeout=30, with and without use_cpu=True.
# Expected: collectives of the process group fail after 30 s.
# Seen: with use_cpu=True the group has 1800 s. The branch for CPUs makes the state of Accelerate without the timeout.
# There is no warning, and training_args.ddp_timeout still says 30.
#
#     use_cpu=False: ddp_timeout 30, group 30 s
#     use_cpu=True: ddp_timeout 30, group 1800 s
#
# Fails if this changes. hf_helix sets the timeout of the group (docs/checkpoints.md, stuck ranks).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/run.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from transformers import TrainingArguments

use_cpu = sys.argv[2] == "True"
args = TrainingArguments(sys.argv[1], use_cpu=use_cpu, ddp_timeout=30, ddp_backend="gloo", report_to="none")
args.device
timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
if dist.get_rank() == 0:
    print(f"use_cpu={use_cpu}: ddp_timeout {args.ddp_timeout}, group {timeout.total_seconds():.0f} s")
dist.destroy_process_group()
PYTHON
for use_cpu in False True; do
    "$folder/venv/bin/torchrun" --nproc_per_node 2 --master_port 29741 "$folder/run.py" "$folder/out" "$use_cpu" \
        2>> "$folder/errors" | grep "use_cpu"
done | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
use_cpu=False: ddp_timeout 30, group 30 s
use_cpu=True: ddp_timeout 30, group 1800 s
SEEN
