#!/usr/bin/env bash
# TRL's GKDTrainer on several processes: loss and gradients shrink with their number.
#
# Versions: trl 1.16.0, torch 2.13.0, transformers 5.23.0, accelerate 1.15.0, gloo, CPU.
# Input: equal rows; one process with batches of 4, and two processes with batches of 2, so that both train the same 4
# rows in a step from the same weights.
# Expected: the same loss and the same norm of the gradient, as of SFTTrainer.
# Seen: half of both with two processes. The loss divides by the number of tokens on all processes, DDP then takes the
# mean over the processes, and nothing multiplies by their number (the Trainer does so only for the loss of the model
# itself). There is no warning.
#
#     1 process:   loss ratio 1.00, norm ratio 1.00
#     2 processes: loss ratio 0.50, norm ratio 0.50
#
# Fails if this changes. hf_helix under GKDTrainer keeps TRL's figures: those of as many data-parallel ranks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 trl==1.16.0
cat > "$folder/run.py" <<'PYTHON'
import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

words = ["<pad>", "<eos>", "<unk>", "user", "assistant", *"abcdefghij"]
core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
tokenizer.chat_template = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def model(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, **sizes))


row = {"messages": [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d e f g"}]}
args = GKDConfig(
    sys.argv[1], per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", 1)), max_steps=1, logging_steps=1,
    lmbda=0.0, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no",
    gradient_checkpointing=False,
)
trainer = GKDTrainer(
    model=model(0), teacher_model=model(1), args=args, processing_class=tokenizer, train_dataset=Dataset.from_list([row] * 8)
)
trainer.train()
if trainer.is_world_process_zero():
    print("SEEN", *(trainer.state.log_history[0][name] for name in ("loss", "grad_norm")))
PYTHON
export HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 OMP_NUM_THREADS=1
one=$("$folder/venv/bin/python" "$folder/run.py" "$folder/one" 2> "$folder/errors" | grep SEEN)
two=$("$folder/venv/bin/torchrun" --nproc_per_node 2 --master_port 29731 "$folder/run.py" "$folder/two" \
    2>> "$folder/errors" | grep SEEN)
python3 - "$one" "$two" <<'PYTHON' | tee "$folder/seen"
import sys

one, two = (list(map(float, line.split()[1:])) for line in sys.argv[1:])
for name, row in (("1 process:  ", one), ("2 processes:", two)):
    loss, norm = (mine / alone for mine, alone in zip(row, one))
    print(f"{name} loss ratio {loss:.2f}, norm ratio {norm:.2f}")
PYTHON
diff "$folder/seen" - <<'SEEN'
1 process:   loss ratio 1.00, norm ratio 1.00
2 processes: loss ratio 0.50, norm ratio 0.50
SEEN
