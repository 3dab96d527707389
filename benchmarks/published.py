"""Predicted against published: the training throughput that others have measured, row by row.

A row is a JSON object on a line. `framework` is "one strand, 1f1b" of a run like Megatron's, "fsdp", "hsdp", or a rival
of the doctor; `cluster`, `gpus` and `network` are as in `hf-helix doctor`; `model` has the fields of a configuration;
`batch` sequences are a micro-batch, and `batch` 0 leaves micro-batches to the doctor. `sequence_length`,
`microbatches`, `tp`, `pp`, `cp`, `ep`, `recompute`, `schedule`, `float8`, `lora`, `sync`, `zero1` and `zero3` may be
missing. What no row says, the software of its source, is in `ORIGINS`. Rows without a prediction are named and counted.

    python -m benchmarks.published benchmarks/published.jsonl
    python -m benchmarks.published benchmarks/published.jsonl --markdown table.md
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

from benchmarks import common
from benchmarks.paper.tiles import step_in_tiles, tile_profile
from hf_helix.cli.doctor import DoctorCommand
from hf_helix.doctor.amounts.records import Amounts
from hf_helix.doctor.case import COMPILED, FLASH1, FLASH2, MEGATRON, RING, STOCK, Case, Software
from hf_helix.doctor.exactness import kind_of, statistics_of
from hf_helix.doctor.layouts import BATCHES
from hf_helix.doctor.rivals import FSDP, FSDP_FUSED, HSDP, PIPELINE_OFFLOAD, RIVALS, rival_cases, simulate_rival
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.doctor.step import Step, profile_of, simulate_step
from hf_helix.doctor.window import Fidelity
from hf_helix.models.small_config import EXPERT_COUNTS
from hf_helix.planning.timing.cluster import Cluster
from hf_helix.planning.timing.sizes import Sizes

MEGATRON_LIKE = "one strand, 1f1b"
STEP_TOKENS = 512_000  # of a row that does not say its micro-batches
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Origin:
    """What a source says of all its rows, and a row does not.

    Attributes:
        software: the kernels of its runs.
        tiles: whether collectives of tensor parallelism run in tiles beside products (`tp_comm_overlap` of Megatron).
        sharded: whether weights are sharded besides tensor parallelism.
        halved: whether selective recomputation runs half of the layers, or every second product, again.
        sync: whether FSDP reduces gradients in every micro-batch.
        adapted: modules with LoRA adapters.
        in_pairs: number of devices of a board that are joined in pairs; 0 with a switch.
        about: where this is said.
    """

    software: Software
    tiles: bool = False
    sharded: bool = False
    halved: bool = False
    sync: bool = False
    adapted: str = "all-linear"
    in_pairs: int = 0
    about: str = ""


OLD = 0.8
"""Rate of products of cuBLAS in CUDA 11.8 and 12.1, of 2023, on an H100, in parts of that of today: fitted on
llm-foundry's rows, tested on fms-fsdp's."""

HALF_SUMS = 2
"""Rate of products with sums in fp16, RoundPipe's default, in parts of that with sums in fp32, on GeForce cards."""

SUSTAINED = 0.74 / 0.819
"""Rate of products of an A100 in parts of that in the A800's file, which is fitted on the paper alone."""

_WATTS, _HBM2E = 0.85, 0.72
"""Rate of products at 500 W in parts of that at 700 W: clocks fall with the root of the power; and of HBM2e in parts of
HBM3. torchtitan's H100 have 500 W and HBM2e (benchmarks/llama3_h100_202412_torchtitan.md)."""

_NEMO = replace(MEGATRON, sums="bf16")

ORIGINS: Mapping[str, Origin] = {
    "llm-foundry": Origin(
        replace(STOCK, attention=FLASH1, products=OLD), sync=True, about="torch 2.0, FSDP 1, FlashAttention 1"
    ),
    "torchtitan table 2": Origin(
        replace(COMPILED, attention=RING, products=_WATTS, memory=_HBM2E), about="compiled, float8, a ring of torch"
    ),
    "torchtitan": Origin(
        replace(STOCK, products=_WATTS, memory=_HBM2E, sums="fp32"),
        halved=True,
        about="FSDP 2, not compiled, sums in fp32",
    ),
    "fms-fsdp": Origin(replace(COMPILED, products=OLD, sums="bf16"), about="compiled, FSDP 1 with sums in bf16"),
    "kempnerforge": Origin(COMPILED, sharded=True, in_pairs=4, about="compiled, FSDP 2 over tensor parallelism"),
    "aleph alpha": Origin(replace(MEGATRON, attention=FLASH2), about="FlashAttention 2, RMS norms in a kernel"),
    "roundpipe": Origin(STOCK, about="stock Trainer; RoundPipe's own products sum in fp16"),
    "nemo automodel": Origin(replace(MEGATRON, once_a_node=0.5), about="Transformer Engine, DeepEP: 4 nodes of 8 rows"),
    "nemo": Origin(_NEMO, tiles=True, adapted="q_proj,k_proj,v_proj", about="Megatron with tp_comm_overlap"),
    "megatron-bridge": Origin(_NEMO, tiles=True, about="Megatron with tp_comm_overlap"),
    "megatron": Origin(MEGATRON, tiles=True, about="Megatron with tp_comm_overlap"),
    "llama 3 herd": Origin(MEGATRON),
}
"""By a part of the name of a source, the first that fits."""

ELSE = {True: Origin(MEGATRON), False: Origin(STOCK)}  # by whether a run is like Megatron's


def origin_of(row: Row) -> Origin:
    """Returns what is known of the source of a row."""
    source = str(row.get("source", "")).lower()
    found = next((origin for part, origin in ORIGINS.items() if part in source), None)
    return found or ELSE[row["framework"] == MEGATRON_LIKE]


class Predictor:
    """Predicts rows; a model is made once for all its rows.

    Args:
        folder: for configurations.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, SimulatedModel] = {}

    def tokens_per_second(self, row: Row) -> float:
        """Returns the predicted tokens per second of a device.

        Raises:
            ValueError: the row cannot be predicted.
        """
        cluster, name = self._cluster(row), rival_of(row)
        model = self._model(row, cluster)
        if name is not None and not row.get("batch"):
            return self._searched(row, name, model, cluster)
        case = case_of(row, cluster, name)
        seconds = [
            (
                _simulated(row, model.amounts(each), each, cluster)
                if name is None
                else simulate_rival(name, model.amounts(each), each, cluster, _syncs(row)).step
            ).seconds
            for each in halves(row, case)
        ]
        return case.tokens / cluster.devices / statistics.fmean(seconds)

    def _searched(self, row: Row, name: str, model: SimulatedModel, cluster: Cluster) -> float:
        """Returns the fastest micro-batches of a rival that fit, without fused kernels where it has a choice."""
        device = cluster.device
        faster = HALF_SUMS if name == PIPELINE_OFFLOAD and "GeForce" in device.name else 1.0
        faster *= SUSTAINED if "A800" in device.name else 1.0
        peaks = {kind: faster * peak for kind, peak in device.peaks.items()}
        cluster = replace(cluster, device=replace(device, peaks=peaks))
        found, length = [], int(row["sequence_length"])
        for batch in BATCHES:
            count = max(1, round(STEP_TOKENS / (batch * length * cluster.devices)))
            sizes = Sizes(dp=cluster.devices)
            usual = Case.of(sizes, batch, length, count, plan="sequential", whole_logits=True)
            for case, syncs, fused in rival_cases(name, usual, cluster):
                if not fused or name in (PIPELINE_OFFLOAD, FSDP_FUSED):
                    found.append(simulate_rival(name, model.amounts(case), case, cluster, syncs, fused).step)
        fitting = [step for step in found if step.memory.total <= cluster.device.memory]
        if not found:
            raise ValueError(f"{name} has no case on {cluster.name}")
        fastest = max(fitting or found, key=lambda step: step.tokens_per_second)
        return fastest.tokens_per_second / cluster.devices

    def _cluster(self, row: Row) -> Cluster:
        cluster = self._command(row).scaled_cluster()
        return replace(cluster, node=replace(cluster.node, joined=origin_of(row).in_pairs))

    def _command(self, row: Row, model: str = "") -> DoctorCommand:
        gpus = row.get("gpus")
        return DoctorCommand(
            model=model,
            cluster=row["cluster"],
            gpus=None if gpus is None else str(gpus),
            network=row.get("network"),
            sequence_length=row["sequence_length"],
            lora_r=int(row.get("lora") or 0),
            target_modules=origin_of(row).adapted,
        )

    def _model(self, row: Row, cluster: Cluster) -> SimulatedModel:
        key = json.dumps([row["model"], row.get("lora"), row["cluster"]], sort_keys=True)
        if key not in self._models:
            folder = self._folder / str(len(self._models))
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(row["model"]))
            self._models[key] = self._command(row, str(folder)).simulated_model(cluster)
        return self._models[key].on(cluster)


def _simulated(row: Row, amounts: Amounts, case: Case, cluster: Cluster) -> Step:
    """Returns the step of a run like Megatron's, whose collectives of tensor parallelism may run in tiles."""
    step, tiles = simulate_step(amounts, case, cluster, Fidelity.QUICK), case.sizes.tp
    if not origin_of(row).tiles or tiles == 1:
        return step
    return step_in_tiles(step, tile_profile(profile_of(amounts, case, cluster), tiles), amounts, cluster, tiles)


def rival_of(row: Row) -> str | None:
    """Returns the rival of a row; None for a run like Megatron's."""
    framework = row["framework"]
    if framework == MEGATRON_LIKE:
        return None
    names = {"fsdp": FSDP, "hsdp": HSDP, "FSDP (ZeRO-3)": FSDP, **{name: name for name in RIVALS}}
    if framework not in names:
        raise ValueError(f"framework {framework!r} is not known; use one of {', '.join([MEGATRON_LIKE, *names])}")
    return names[framework]


def case_of(row: Row, cluster: Cluster, rival: str | None) -> Case:
    """Returns the case of a row on a cluster. Raises ValueError for sizes that do not divide the devices."""
    tp, cp, pp, ep = (int(row.get(name) or 1) for name in ("tp", "cp", "pp", "ep"))
    dp, rest = divmod(cluster.devices, tp * cp * pp)
    if rest or dp % ep:
        raise ValueError(f"tp {tp} x pp {pp} x cp {cp} with ep {ep} does not divide {cluster.devices} devices")
    origin, is_rival = origin_of(row), rival is not None
    whole = is_rival or (origin.sharded and dp > 1) or bool(row.get("zero3"))
    return Case.of(
        Sizes(tp, cp, pp, dp, ep, stages_outermost=pp > 1),
        int(row["batch"]),
        int(row["sequence_length"]),
        int(row["microbatches"]),
        plan="sequential",
        schedule=row.get("schedule") or "auto",
        recompute=row.get("recompute") or "none",
        shard_optimizer=not whole,
        shard_parameters=whole and not is_rival,
        reduce_gradients="microbatch" if whole and not is_rival else "window",
        whole_logits=is_rival,
        float8=row.get("float8"),
        software=software_of(row, origin),
    )


def software_of(row: Row, origin: Origin) -> Software:
    """Returns the software of a row; what slows products on an H100 does not slow them on older devices."""
    is_new = str(row["cluster"]).startswith(("h100", "h200", "b200"))
    return origin.software if is_new else replace(origin.software, products=1.0, memory=1.0)


def halves(row: Row, case: Case) -> list[Case]:
    """Returns the cases whose mean is a row: two if selective recomputation runs half of the products again."""
    if case.recompute != "selective" or not origin_of(row).halved:
        return [case]
    return [case.changed(recompute=mode) for mode in ("none", "full")]


def _syncs(row: Row) -> bool:
    """Returns whether FSDP reduces gradients in every micro-batch."""
    given = row.get("sync")
    return origin_of(row).sync if given is None else bool(given)


@dataclass(frozen=True)
class Compared:
    """A row with its prediction.

    Attributes:
        row: the row; empty if its line is no JSON.
        predicted: tokens per second of a device; 0 without a prediction.
        error: why there is none.
    """

    row: Row
    predicted: float = 0.0
    error: str = ""

    @property
    def published(self) -> float:
        """Tokens per second of a device."""
        return float(self.row["tokens_per_second_per_gpu"])

    @property
    def ratio(self) -> float:
        """Predicted in parts of published."""
        return self.predicted / self.published


def compare(lines: Sequence[str], predict: Callable[[Row], float]) -> Iterator[Compared]:
    """Yields the rows of a file, compared; a wrong row has an error and does not end it."""
    for number, line in enumerate(lines, 1):
        row: Row = {"id": f"line {number}"}
        try:
            row = {**row, **json.loads(line)}
            found = Compared(row, predict(row))
            if not (math.isfinite(found.ratio) and found.ratio > 0):
                raise ValueError("tokens_per_second_per_gpu, or its prediction, is not above 0")
            yield found
        except Exception as error:  # whatever a row has
            reason = str(error).partition("\n")[0] or type(error).__name__
            yield Compared(row, error=f"{type(error).__name__}: {reason}" if isinstance(error, KeyError) else reason)


def summary(rows: Sequence[Compared]) -> str:
    """Returns the last line: the error over the rows that could be predicted."""
    ratios = [row.ratio for row in rows if not row.error]
    if not ratios:
        return "rows 0, median ratio nan, mean |log ratio| nan, within 15 %: 0 %"
    middle, errors, within = statistics_of(ratios)
    counts = f"rows {len(ratios)}, median ratio {middle:.3f}, mean |log ratio| {errors:.3f}"
    return f"{counts}, within 15 %: {100 * within:.0f} %"


def cells(row: Compared) -> tuple[str, ...]:
    """Returns the identity of a row, its published and predicted tokens per second of a device, and their ratio."""
    name = str(row.row.get("id", ""))
    if row.error:
        return name, "", "", row.error
    return name, f"{row.published:,.1f}", f"{row.predicted:,.1f}", f"{row.ratio:.2f}"


def markdown(rows: Sequence[Compared]) -> str:
    """Returns the rows as a table of Markdown, each with its source."""
    found = ((str(row.row.get("source", "")), *cells(row)) for row in rows)
    table = [(name, source, *figures) for source, name, *figures in found]
    return common.markdown(("row", "source", "published", "predicted", "ratio"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="rows, a JSON object on each line")
    parser.add_argument("--record", type=Path, help="also write the rows as hf_helix/doctor/published.json has them")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    lines = [line for line in options.file.read_text().splitlines() if line.strip()]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'row':<30}{'published':>12}{'predicted':>12}  ratio")
        for row in compare(lines, Predictor(Path(folder)).tokens_per_second):
            name, published, predicted, ratio = cells(row)
            print(f"{name:<30}{published:>12}{predicted:>12}  {ratio}", flush=True)
            rows.append(row)
    failed = [str(row.row.get("id")) for row in rows if row.error]
    if failed:
        print(f"cannot be said: {len(failed)} of {len(rows)} rows: {', '.join(failed)}")
    if options.markdown:
        options.markdown.write_text(f"{markdown(rows)}\n\n{summary(rows)}\n")
    if options.record:
        options.record.write_text(record(rows))
    print(summary(rows))


def record(rows: Sequence[Compared]) -> str:
    """Returns the rows as `hf_helix.doctor.exactness` reads them."""
    runs = [
        json.dumps(
            [
                row.row["id"],
                row.row["source"],
                row.row["cluster"],
                kind_of_row(row.row),
                round(row.published, 1),
                round(row.predicted, 1),
            ]
        )
        for row in rows
        if not row.error
    ]
    return "[\n" + ",\n".join(runs) + "\n]\n"


def kind_of_row(row: Row) -> str:
    """Returns the kind of a row."""
    tp, cp, pp = (int(row.get(name) or 1) for name in ("tp", "cp", "pp"))
    model = row["model"]
    experts = max(int(model.get(name) or 1) for name in EXPERT_COUNTS)
    return kind_of(Case.of(Sizes(tp, cp, pp), 1, int(row["sequence_length"]), 1, float8=row.get("float8")), experts)


if __name__ == "__main__":
    main()
