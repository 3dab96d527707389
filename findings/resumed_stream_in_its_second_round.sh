#!/usr/bin/env bash
# A stream without a length that has ended once, resumed in its second round.
#
# Versions: torch 2.13.0, transformers 5.23.0, accelerate 1.15.0, one process, CPU.
# Input: an IterableDataset of 5 rows, max_steps=9, batches of one row, a checkpoint at step 7.
# Expected: the resumed run goes on with the rows of steps 8 and 9 of the uninterrupted run, rows 2 and 3.
# Seen: it trains on rows 0 and 1. The Trainer counts the epochs of a stream by max_steps, so step 7 lies in its first
# epoch; it skips 7 batches of a stream of 5, which ends, and the next epoch begins at row 0. There is no warning.
#
#     uninterrupted, steps 8 and 9: [2, 3]
#     resumed at step 7, steps 8 and 9: [0, 1]
#
# Fails if this changes. hf_helix saves the round and the step at which it began (docs/checkpoints.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/run.py" <<'PYTHON'
import tempfile

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROWS, SAVED, STEPS = 5, 7, 9


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(ROWS):
            yield {"input_ids": torch.full((4,), number + 1), "labels": torch.full((4,), number + 1)}


def rows_trained(folder, resume=None):
    rows = []

    class Watched(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            rows.append(int(inputs["input_ids"][0, 0]) - 1)
            return super().training_step(model, inputs, *args, **kwargs)

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    usual = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    args = TrainingArguments(folder, max_steps=STEPS, save_steps=SAVED, per_device_train_batch_size=1, **usual)
    Watched(model=model, args=args, train_dataset=Stream()).train(resume_from_checkpoint=resume)
    return rows


with tempfile.TemporaryDirectory() as folder:
    print(f"uninterrupted, steps 8 and 9: {rows_trained(folder)[SAVED:]}")
    print(f"resumed at step 7, steps 8 and 9: {rows_trained(folder, f'{folder}/checkpoint-{SAVED}')}")
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/run.py" 2> "$folder/errors" | grep "steps 8" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
uninterrupted, steps 8 and 9: [2, 3]
resumed at step 7, steps 8 and 9: [0, 1]
SEEN
