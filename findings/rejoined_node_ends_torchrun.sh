#!/usr/bin/env bash
# Elastic torchrun: a node that comes back ends the run of all nodes.
#
# Versions: torch 2.13.0, torchrun with --rdzv-backend c10d, gloo, CPU; two launchers on one machine.
# Input: two launchers of one process each, --nnodes 1:2 --max-restarts 10; the second one is killed with its process,
# the first goes on alone, as it should; then the second is started again.
# Expected: both launchers start their processes for a new round with two nodes.
# Seen: the launcher that has the store of rank 0 does not publish its address for the new round, the newcomer waits a
# minute for it, and both end with an error. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 the round of two nodes begins.
#
#     as it is:                             worlds 2 1, then an error
#     TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: worlds 2 1 2
#
# Fails if this changes. hf_helix prints a line for runs with `layouts` (docs/checkpoints.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'pkill -9 -f "$folder/" || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
cat > "$folder/run.py" <<'PYTHON'
import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with open(sys.argv[1], "a") as worlds:
        print(dist.get_world_size(), file=worlds)
while not os.path.exists(sys.argv[2]):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
PYTHON

launch() {  # the name of the launcher
    setsid "$folder/venv/bin/torchrun" --nnodes 1:2 --nproc-per-node 1 --max-restarts 10 --rdzv-id "$1" \
        --rdzv-backend c10d --rdzv-endpoint "localhost:$2" --rdzv-conf "last_call_timeout=5" \
        "$folder/run.py" "$folder/worlds-$1" "$folder/end-$1" >> "$folder/output-$1" 2>&1 &
}

wait_for() {  # lines in a file, at most so many seconds; fails if a launcher ends before
    for _ in $(seq "$3"); do
        [ "$(cat "$1" 2> /dev/null | wc -l)" -ge "$2" ] && return 0
        kill -0 "$first" 2> /dev/null || return 1
        sleep 1
    done
    return 1
}

try() {  # a name, a port
    launch "$1" "$2"; first=$!
    launch "$1" "$2"; second=$!
    wait_for "$folder/worlds-$1" 1 60
    kill -9 $(pgrep -P "$second") "$second"  # its process has a session of its own
    wait_for "$folder/worlds-$1" 2 120
    launch "$1" "$2"; second=$!
    if wait_for "$folder/worlds-$1" 3 150; then after=""; else after=", then an error"; fi
    touch "$folder/end-$1"
    kill -9 $(pgrep -P "$first") $(pgrep -P "$second") "$first" "$second" 2> /dev/null || true
    echo "worlds $(tr '\n' ' ' < "$folder/worlds-$1" | sed 's/ $//')$after"
}

{
    echo "as it is:                             $(try plain 29751)"
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    echo "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: $(try apart 29761)"
} | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
as it is:                             worlds 2 1, then an error
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: worlds 2 1 2
SEEN
