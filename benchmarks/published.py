"""Predicted against published: training throughput that others have measured, row by row.

A row is a JSON object on a line: `id`, `source`, `framework`, `cluster`, `gpus`, `network`, `model` (the fields of a
configuration), `batch` (sequences of a micro-batch), `sequence_length`, `microbatches`, `tp`, `pp`, `cp`, `ep`,
`recompute`, `schedule`, `float8`, `lora`, `sync`, `zero1`, `zero3`, and `tokens_per_second_per_gpu`. `framework` is "one
strand, 1f1b" of a run like Megatron's, "fsdp", "hsdp", or the name of a rival of the doctor; `batch` 0 is a row that does
not say its micro-batches: the fastest of the rival's.

    python -m benchmarks.published FILE.jsonl
    python -m benchmarks.published FILE.jsonl --markdown table.md
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_helix.cli.doctor import DoctorCommand
from hf_helix.doctor.amounts.amounts import Amounts
from hf_helix.doctor.case import Case
from hf_helix.doctor.layouts import Search
from hf_helix.doctor.rivals import FSDP, HSDP, RIVALS, simulate_rival
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.sizes import Sizes
