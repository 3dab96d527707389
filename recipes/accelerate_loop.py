"""A loop of one's own around Accelerate, over several ranks, communication behind computation.

    accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/accelerate_loop.py [STEPS]

In:   the configuration of a model, Python's documentation as bytes, and the layout in the launcher's YAML.
Out:  an ordinary Hugging Face checkpoint in `runs/accelerate_loop`.
"""

import pydoc_data.topics
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator, get_scheduler

from hf_helix import HelixPlugin

STEPS, LENGTH = int([*sys.argv, "60"][1]), 128


def main() -> None:
    plugin = HelixPlugin()  # the layout is the launcher's
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(parallelism_config=plugin, gradient_accumulation_steps=4, cpu=on_cpu)
    set_seed(42)

    text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
    rows = [list(text[start : start + LENGTH]) for start in range(0, len(text) - LENGTH, LENGTH)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    loader = DataLoader(data[40 : 40 + 16 * STEPS], batch_size=4, shuffle=True, collate_fn=default_data_collator)
    held_out = DataLoader(data[:40], batch_size=4, collate_fn=default_data_collator)
    config = AutoConfig.from_pretrained(Path(__file__).parent / "models" / "tiny-llama")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=5, num_training_steps=STEPS)
    objects = model, optimizer, scheduler, loader, held_out
    model, optimizer, scheduler, loader, held_out = plugin.prepare(accelerator, *objects)

    for step, window in enumerate(model.windows(loader), 1):  # every 4 batches
        loss = model.train_window(window)  # forward and backward of all of them
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.6f}")

    losses = []
    for batch in held_out:
        loss = model.evaluate(batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    accelerator.print(f"loss on held-out text: {torch.cat(losses).mean():.3f}")
    model.save_pretrained("runs/accelerate_loop")


if __name__ == "__main__":
    main()
