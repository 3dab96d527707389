"""hf-helix profile: measure every operator, and pairs of operators.

In:   a model's configuration, sizes of the mesh and of a micro-batch.
Out:  a profile, as JSON; a Perfetto trace if asked for.
Must hold: the processes of the mesh are started here, unless a launcher did.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_helix.cli.options import Command, config_option, configuration_file, join, option, start
from hf_helix.config import AXES, FLOAT8, OFFLOAD, RECOMPUTE, HelixConfig
from hf_helix.measure.progress import progress_bar
from hf_helix.planning.choice.scheduler import Scheduler
from hf_helix.planning.timing.profile import Profile
from hf_helix.planning.timing.profile_file import save_profile


@dataclass(kw_only=True)
class ProfileCommand(Command):
    """Measure every operator of a model on this machine, by itself and with others.

    examples:
      hf-helix profile --model Qwen/Qwen3-0.6B --tp_size 2 --sequence_length 256
      hf-helix profile --model path/to/folder --pp_size 2 --tp_size 1 --output pipeline.json --trace trace.json

    Weights and tokens are random: of the model only the configuration is read. The profile is for the measured
    model, layout, machine and shapes. On several hosts, start it with torchrun:
      torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
          -m hf_helix profile --model Qwen/Qwen3-0.6B --tp_size 2
    """

    model: str = option(..., "a folder with a config.json, such a file, or a name on the Hugging Face Hub")
    tp_size: int = config_option("tp_size", default=2)
    pp_size: int = config_option("pp_size")
    cp_size: int = config_option("cp_size")
    ep_size: int = config_option("ep_size")
    expert_capacity_factor: float | None = config_option("expert_capacity_factor")
    inter_node_axes: list[str] | None = config_option("inter_node_axes", choices=AXES)
    schedule: str = config_option("schedule")
    batch_size: int = option(1, "sequences in a micro-batch")
    sequence_length: int = option(512, "tokens in a sequence")
    microbatches: int = option(4, "micro-batches in the window that is timed")
    bf16: bool = option(False, "matrix products in bf16, as TrainingArguments(bf16=True)")
    recompute: str = config_option("recompute", default="none", choices=(*RECOMPUTE, OFFLOAD))
    float8: str | None = config_option("float8", default=None, choices=FLOAT8)
    output: Path = option(Path("profile.json"), "where the profile is written")
    trace: Path | None = option(None, "also write a Perfetto trace of a window, under the plan `greedy`")

    def run(self) -> None:
        """Measure, in as many processes as the mesh needs: started by a launcher, or here by torchrun."""
        Scheduler(self.schedule, self.pp_size)  # refused once, not by every process
        self.model = configuration_file(self.model)
        if "WORLD_SIZE" in os.environ:
            self._measure()
        else:
            self._check_model()
            start(self.words(), self.tp_size * self.pp_size * self.cp_size * self.ep_size)

    def _check_model(self) -> None:
        """Raises ValueError if the model cannot be cut like this."""
        from hf_helix.doctor.counting import check_cut, kinds_of
        from hf_helix.engine.synthetic import model_on_meta

        model = model_on_meta(self.model)
        check_cut(model, kinds_of(model), HelixConfig(**self.of_config()))

    def _measure(self) -> None:
        """The measurement, in each of the processes."""
        import torch
        import torch.distributed as dist

        from hf_helix.engine.synthetic import Workload
        from hf_helix.measure.operators import measure_profile

        device = join(self.pp_size)
        config = HelixConfig(**self.of_config())
        work = Workload(self.model, config, device, autocast_dtype=torch.bfloat16 if self.bf16 else None)
        window = work.window(self.microbatches, self.batch_size, self.sequence_length)
        about = {**work.about, "shapes": ", ".join(batch.shape for batch in window)}
        with progress_bar(dist.get_rank() == 0) as progress:
            profile = measure_profile(
                work.runner, window, about, progress=lambda share: progress("measuring operators", share)
            )
        if dist.get_rank() == 0:
            save_profile(profile, self.output)
            print(f"{len(profile.times)} operators and {len(profile.pairs)} pairs: {self.output}")
        if self.trace:
            _write_trace(self.trace, work, window, profile)
        dist.destroy_process_group()


def _write_trace(path: Path, work: Any, window: Any, profile: Profile) -> None:
    from hf_helix.measure.overlap import trace_window
    from hf_helix.report.perfetto import write_perfetto
    from hf_helix.runtime.distributed.agreement import all_gather_object
    from hf_helix.runtime.distributed.mesh import rank
    from hf_helix.tuning.candidates import plan_runners

    runner = plan_runners(work.runner, ["greedy"], profile, len(window))["greedy"]
    trace_window(runner, window)  # warms up
    spans = all_gather_object(trace_window(runner, window).spans)
    if rank() == 0:
        write_perfetto(path, spans)
        print(f"a trace for https://ui.perfetto.dev: {path}")
