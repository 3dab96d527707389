"""A training script whose run a signal to one rank ends inside a window of 64 micro-batches, and that goes on when
it is started again. It writes what it has seen to `RANK.json`. Started by test_preemption.py."""

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from support.models import arguments, llama, sequences
from transformers.trainer_utils import get_last_checkpoint

from hf_helix import HelixTrainer
from hf_helix.runtime.failures.preemption import Preemption

OUT, STEP, PLACE = "out", 2, 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--signal", default="")
    parser.add_argument("--victim", type=int, default=0)
    parser.add_argument("--own-loss", action="store_true")
    flags = parser.parse_args()
    seen: dict[str, Any] = {"begun": []}
    may_begin = Preemption.may_begin

    def noting(self: Preemption, step: int, microbatch: int) -> bool:
        if (step, microbatch) == (STEP, PLACE) and flags.signal and rank == flags.victim:
            seen["signal"] = time.time()
            os.kill(os.getpid(), getattr(signal, flags.signal))
        begins = may_begin(self, step, microbatch)
        if begins:
            seen["begun"].append((time.time(), step, microbatch))
        if flags.signal and step == STEP and microbatch >= PLACE - 2:
            time.sleep(0.25)  # as long as a micro-batch takes on a busy machine, or longer
        return begins

    Preemption.may_begin = noting  # type: ignore[method-assign]
    options: dict[str, Any] = {}
    if flags.own_loss:
        options["compute_loss_func"] = own_loss
    args = arguments(
        OUT,
        max_steps=3,
        gradient_accumulation_steps=64,
        per_device_train_batch_size=1,
        enable_jit_checkpoint=True,
        include_num_input_tokens_seen="all",
    )
    rank = args.process_index
    rows = [{name: value[:6] for name, value in row.items()} for row in sequences(400)]
    trainer = HelixTrainer(model=llama(num_hidden_layers=4), args=args, train_dataset=rows, **options)
    last = get_last_checkpoint(OUT) if Path(OUT).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    state = trainer.state
    seen |= {"step": state.global_step, "tokens": state.num_input_tokens_seen, "flos": state.total_flos}
    seen["train_loss"] = state.log_history[-1]["train_loss"]
    seen["losses"] = [(entry["step"], entry["loss"]) for entry in state.log_history if "loss" in entry]
    seen["saved"] = sorted(path.name for path in Path(OUT).glob("checkpoint-*"))
    Path(f"{rank}.json").write_text(json.dumps(seen))


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


if __name__ == "__main__":
    main()
