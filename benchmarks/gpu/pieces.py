"""The pieces of the acceptance, in order of value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One piece.

    Attributes:
        name: on the command line; the module `benchmarks.gpu.<name>` has its `run`.
        about: what it shows, in one line.
        seconds: its time limit on a GPU.
        call: of the calls of at most ten minutes, the one that the piece is run in (`--call`).
        alone: whether nothing may run beside it, since it measures times, or starts processes that must answer in time.
    """

    name: str
    about: str
    seconds: float
    call: int = 1
    alone: bool = False


PIECES = (
    Piece("trainer", "HelixTrainer on one GPU against the stock Trainer: step time, loss, memory", 180, alone=True),
    Piece("profile", "the kernels of a step, and the share of it without a kernel", 60, alone=True),
    Piece("overlap", "how much communication is hidden at the shapes of an 8B model", 150, alone=True),
    Piece("graphs", "windows from CUDA graphs against the same operator by operator, bit for bit", 90),
    Piece("attention", "the kernels of context parallelism against attention written out; costs", 60, alone=True),
    Piece("ranks", "two NCCL ranks: every layout against one process, a save, a kill, the Trainer", 420, 2, alone=True),
    Piece("kernels", "the times of single kernels that decisions rest on", 90, 2, alone=True),
    Piece("parity", "losses and gradients against fp64, bf16's error, GPU = CPU, plans bit for bit", 180, 3),
    Piece("sizes", "windows of large models: time and memory beside the doctor's", 150, 3, alone=True),
    Piece("stress", "links at random paces and poisoned memory change no bit", 120, 3),
    Piece("sanitizer", "compute-sanitizer's memcheck on a tiny window, where it is installed", 120, 3),
)
