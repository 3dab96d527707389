#!/usr/bin/env bash
# Accelerate on CPUs: two processes of one host find LOCAL_WORLD_SIZE=1 in their own environment.
#
# Versions: accelerate 1.15.0, torch 2.13.0, gloo, CPU.
# Input: two processes with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, all that torch's env:// asks for,
# as scripts around srun or subprocess start them; each makes Accelerator(cpu=True).
# Expected: LOCAL_WORLD_SIZE stays unset, or becomes 2.
# Seen: Accelerate writes LOCAL_WORLD_SIZE=1 into the environment of both, also of the one with LOCAL_RANK=1. Code that
# asks the variable later (how many ranks share memory or cores) takes one rank for all of the host.
#
#     before: unset
#     rank 0: LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
#     rank 1: LOCAL_RANK=1 LOCAL_WORLD_SIZE=1
#
# Fails if this changes. hf_helix believes a 1 only from torchrun or on GPUs (runtime/distributed/mesh.py, ranks_of_host).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 accelerate==1.15.0
cat > "$folder/run.py" <<'PYTHON'
import os

import torch.distributed as dist
from accelerate import Accelerator

if os.environ["RANK"] == "0":
    print(f"before: {os.environ.get('LOCAL_WORLD_SIZE', 'unset')}", flush=True)
accelerator = Accelerator(cpu=True)
for rank in range(2):
    accelerator.wait_for_everyone()
    if rank == accelerator.process_index:
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        print(f"rank {rank}:", *(f"{name}={os.environ[name]}" for name in names), flush=True)
accelerator.wait_for_everyone()
dist.destroy_process_group()
PYTHON
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29743 OMP_NUM_THREADS=1
unset LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID
for rank in 1 0; do
    RANK=$rank LOCAL_RANK=$rank "$folder/venv/bin/python" "$folder/run.py" > "$folder/seen.$rank" 2> "$folder/errors.$rank" &
done
wait
sort "$folder/seen.0" "$folder/seen.1" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
before: unset
rank 0: LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
rank 1: LOCAL_RANK=1 LOCAL_WORLD_SIZE=1
SEEN
