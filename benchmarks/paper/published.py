"""What the paper printed: DHelix, arXiv 2411.15871v1 (ICCD 2025 under the name DHeLlam).

In:   nothing.
Out:  `MODELS`, the rows of its figures and tables, and single numbers of its text.
Must hold: every number names where it stands. Bars of figures 11 to 13 are read from the vector files of the paper, to
a tenth of a TFLOP/s; nothing here was computed by this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hf_helix.planning.timing.sizes import Sizes

MEGATRON, INTRA_BATCH, WAVELET, DHELIX = "Megatron", "Intra-batch", "Wavelet+", "DHelix"
METHODS = (MEGATRON, INTRA_BATCH, WAVELET, DHELIX)

BATCH_TOKENS = 8 * 2**20
"""Tokens of a step of Llama and GPT, section 6.2."""

BATCH_SEQUENCES = 1600
"""Sequences of a step of Phi, section 6.2."""


@dataclass(frozen=True)
class Shape:
    """A model of tables 3 to 5. Heads have 128 features, with keys and values of their own, as the authors coded them;
    but Llama-405B, of which the paper only counts bytes, is Meta's.

    Attributes:
        family: "llama", "gpt2" or "phimoe", as Transformers calls it.
        hidden: features of a token.
        inner: features inside of an MLP, or of an expert.
        layers: how many.
        experts: of a layer; 0 for a dense model.
        kv_heads: heads of keys and values; 0 for as many as of queries.
    """

    family: str
    hidden: int
    inner: int
    layers: int
    experts: int = 0
    kv_heads: int = 0


TOP_K = 2
"""Experts of a token in Phi, section 6.1."""

MODELS: Mapping[str, Shape] = {
    "Llama-8B": Shape("llama", 4096, 14336, 32),
    "Llama-25B": Shape("llama", 8192, 28672, 28),
    "Llama-39B": Shape("llama", 16384, 53248, 12),
    "Llama-66B": Shape("llama", 8192, 28672, 76),
    "Llama-405B": Shape("llama", 16384, 53248, 126, kv_heads=8),
    "GPT-6.7B": Shape("gpt2", 4096, 16384, 32),
    "GPT-18B": Shape("gpt2", 6144, 24576, 40),
    "GPT-30B": Shape("gpt2", 12288, 49152, 16),
    "Phi-31B": Shape("phimoe", 4096, 6400, 24, 16),
    "Phi-42B": Shape("phimoe", 4096, 6400, 32, 16),
}


@dataclass(frozen=True)
class Row:
    """One group of bars: a model trained with one layout under several methods.

    Attributes:
        where: the figure or table.
        model: a key of `MODELS`.
        cluster: the name of a cluster that the package brings.
        length: tokens of a sequence.
        sizes: the layout.
        printed: TFLOP/s of a GPU, counted with full attention; of Phi, tokens a second of the whole cluster.
        layers: of the model, where they are not those of `MODELS`.
        sequences: in a step, where they are not those of section 6.2.
        capacity: of experts, as `--moe-expert-capacity-factor` of Megatron-LM; 0 where no token is dropped or added.
    """

    where: str
    model: str
    cluster: str
    length: int
    sizes: Sizes
    printed: Mapping[str, float] = field(default_factory=dict, compare=False)
    layers: int | None = None
    sequences: int | None = None
    capacity: int = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether speed is given in tokens a second."""
        return MODELS[self.model].experts > 0

    @property
    def microbatches(self) -> int:
        """Micro-batches of one sequence that a data-parallel rank has in a step."""
        usual = BATCH_SEQUENCES if self.counts_tokens else BATCH_TOKENS // self.length
        return max(1, (self.sequences or usual) // self.sizes.dp)

    @property
    def name(self) -> str:
        """The model, the length, and the layout as the figures write it."""
        sizes = self.sizes
        parts = [f"dp{sizes.dp}", f"tp{sizes.tp}", f"cp{sizes.cp}", f"pp{sizes.pp}", f"ep{sizes.ep}"]
        layout = " ".join(part for part in parts if not part.endswith("p1"))
        return f"{self.model} {self.length // 1024}k {layout}"


def _dense(where: str, cluster: str, model: str, length: int, sizes: Sizes, *printed: float) -> Row:
    methods = METHODS if len(printed) == 4 else (MEGATRON, WAVELET, DHELIX)
    return Row(where, model, cluster, length, sizes, dict(zip(methods, printed, strict=True)))


def _figure_11(model: str, dp: int, tp: int, pp: int, *printed: float) -> Row:
    return _dense("Figure 11", "a40x64", model, 8192, Sizes(tp=tp, pp=pp, dp=dp), *printed)


def _figure_12(model: str, dp: int, tp: int, pp: int, *printed: float) -> Row:
    return _dense("Figure 12", "a40x64", model, 16384, Sizes(tp=tp, cp=2, pp=pp, dp=dp), *printed)


FIGURE_11 = (
    _figure_11("Llama-8B", 16, 4, 1, 64.4, 68.5, 68.5, 84.1),
    _figure_11("Llama-25B", 8, 8, 1, 53.9, 58.8, 62.5, 75.7),
    _figure_11("Llama-39B", 4, 8, 2, 68.1, 74.8, 69.5, 86.3),
    _figure_11("GPT-6.7B", 16, 4, 1, 61.6, 67.9, 69.4, 77.4),
    _figure_11("GPT-18B", 8, 8, 1, 40.6, 42.5, 45.4, 56.9),
    _figure_11("GPT-30B", 4, 8, 2, 57.8, 66.4, 65.4, 78.6),
)
FIGURE_12 = (
    _figure_12("Llama-8B", 8, 4, 1, 59.8, 63.5, 67.2, 78.0),
    _figure_12("Llama-25B", 4, 8, 1, 38.4, 40.6, 40.9, 50.0),
    _figure_12("Llama-39B", 2, 8, 2, 51.9, 55.3, 55.6, 72.0),
    _figure_12("GPT-6.7B", 8, 4, 1, 57.3, 62.3, 64.4, 75.1),
    _figure_12("GPT-18B", 4, 8, 1, 28.4, 29.9, 30.8, 34.6),
    _figure_12("GPT-30B", 2, 8, 2, 41.9, 45.7, 46.0, 51.4),
)
FIGURE_13A = (
    _dense("Figure 13 (a)", "a800x64", "Llama-66B", 16384, Sizes(tp=8, cp=2, pp=2, dp=2), 186.0, 188.8, 199.7),
    _dense("Figure 13 (a)", "a800x64", "Llama-66B", 32768, Sizes(tp=8, cp=4, pp=2, dp=1), 160.9, 175.2, 199.7),
)


def _experts(where: str, cluster: str, model: str, capacity: int, *printed: float) -> Row:
    sizes = Sizes(pp=4, dp=16, ep=8, stages_outermost=True)
    return replace(_dense(where, cluster, model, 3072, sizes, *printed), capacity=capacity)


FIGURE_13B = (_experts("Figure 13 (b)", "a800x64", "Phi-42B", 8, 55265, 57716, 63653),)
TABLE_6 = (_experts("Table 6", "a40x64", "Phi-31B", 6, 59941, 62454, 75386),)

SPEEDS = (*FIGURE_11, *FIGURE_12, *FIGURE_13A, *TABLE_6, *FIGURE_13B)
"""Every row with speeds."""

FIGURE_15 = {
    "a": Row("Figure 15 (a)", "Llama-39B", "a40x64", 16384, Sizes(tp=8, cp=2, pp=2, dp=2)),
    "b": Row("Figure 15 (b)", "Llama-39B", "a40x64", 32768, Sizes(tp=8, cp=4, pp=2, dp=1)),
}
INCREMENTS: Mapping[str, tuple[float, ...]] = {"a": (11.18, 22.5, 0.0, 5.0), "b": (5.37, 14.4, 7.0, 1.0)}
"""What each step of figure 15 adds, in percent of the baseline, section 6.4: overlap of TP, of CP, of both with each
other, and W's that move. "About" 7, 5 and 1 in the text."""


def _wide(where: str, cluster: str, tp: int) -> Row:
    """Figure 14 and table 7 do not say the model, only that a larger `tp` lets it have more layers."""
    sizes = Sizes(tp=tp, dp=32 // tp)
    return Row(where, "Llama-25B", cluster, 8192, sizes, layers=10 * tp // 8, sequences=256)


FIGURE_14 = {
    "H100": tuple(_wide("Figure 14", "h100x32", tp) for tp in (8, 16, 32)),
    "A800": tuple(_wide("Figure 14", "a800x64", tp) for tp in (8, 16, 32)),
}
MOST_GAIN = {"H100": 0.17, "A800": 0.29}
"""The largest gain over Megatron that section 6.3.3 reports of figure 14; its bars cannot be read."""

TABLE_7 = {8: (57.87, 32.48, 9.65), 16: (66.73, 23.01, 10.26), 32: (51.72, 29.45, 18.83)}
"""Percent of communication by tensor-parallel size on H100: hidden, visible by slowdown, visible by launches."""

SHARES = {"Llama-39B": ("TP and CP", 0.55), "Phi-31B": ("EP", 0.343)}
"""Part of the time that communication takes in figure 3, as section 3.1 says."""

TABLE_1 = (
    (Sizes(tp=8, pp=16, dp=64), 8192, (441.0, 0.98), (8.6, 0.17)),
    (Sizes(tp=8, pp=16, dp=128), 8192, (220.0, 0.3), (7.7, 0.15)),
    (Sizes(tp=8, cp=16, pp=16, dp=8), 131072, (3528.0, 7.84), (376.0, 7.52)),
)
"""Layout of Llama-405B, length of a sequence, and (GiB, seconds) inside a node and between nodes. The lengths are not
printed: with them the volumes inside a node come out; the last has 16 times the tokens of the others."""

STATES_SHARE = 0.30
"""Part of the memory that the states of the model take at least, figure 5 and section 3.3."""

LARGEST = {MEGATRON: 40.0, DHELIX: 39.0, "two copies": 32.0}
"""Billions of parameters of the largest model that fits, section 6.5."""

OVERLAPPED = 0.82
"""Part of communication that runs beside computation in figure 16."""
