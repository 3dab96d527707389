"""The equivalence classes: one table of the runs that must give what the unsplit Transformers model gives.

In:   nothing.
Out:  `CASES`, by name. Those with one model and one batch are a class: they share one run of the unsplit model.
Must hold: every model class of the package stands here with every layout that `hf-helix models` names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support import marks
from support.derived_models import HOME, HYBRIDS
from support.models import FAMILIES
from support.parity import KINDS, LENGTHS

AXES = ("tp", "pp", "cp", "dp", "ep")  # in the order in which layouts name them
BOTH = ("folded_1f1b", "dualpipe_v")


@dataclass(frozen=True)
class Case:
    """A window on one layout.

    Attributes:
        name: of the case, in reports.
        model: the family of `support.models`, and in what the model differs from its tiny one.
        layout: such as `tp2+dp2`; empty for one process.
        kind: of the batches, see `batches_of`.
        count: micro-batches of each data-parallel rank.
        rows: of each batch.
        lengths: of the sequences, in turn.
        schedules: of the pipeline, run one after the other.
        options: more of `HelixConfig`.
        floor: of differences of gradients, in parts of the norm of all, for gradients that are almost zero.
    """

    name: str
    model: Mapping[str, Any]
    layout: str
    kind: str
    count: int = 3
    rows: int = 2
    lengths: Sequence[int] = LENGTHS
    schedules: Sequence[str] = ("folded_1f1b",)
    options: Mapping[str, Any] = field(default_factory=dict)
    floor: float = 0.0
    slow: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis."""
        return sizes_of(self.layout)

    @property
    def ranks(self) -> int:
        """The number of processes. Ranks that share experts are data-parallel ones."""
        return math.prod(size for axis, size in self.sizes.items() if axis != "ep")

    @property
    def helix(self) -> dict[str, Any]:
        """The options of `HelixConfig`."""
        return {f"{axis}_size": size for axis, size in self.sizes.items() if axis != "dp"} | dict(self.options)


def sizes_of(layout: str) -> dict[str, int]:
    """The size of every axis of a layout such as `tp2+dp2`."""
    return dict.fromkeys(AXES, 1) | {part[:2]: int(part[2:]) for part in layout.split("+") if part}


CASES: dict[str, Case] = {}


def add(name: str, model: Mapping[str, Any], where: str, slow: bool = False, **changes: Any) -> None:
    """Add cases of a model; a case that is there already stays as it is.

    Args:
        name: of the model, in reports.
        where: the layouts, each with the kind of its batches, such as `tp2:left pp2:packed`; without a kind: all kinds.
        slow: among the tests that take minutes.
        changes: to the other attributes of `Case`; what is none of them is an option of `HelixConfig`.
    """
    given = {key: changes.pop(key) for key in ("count", "lengths", "schedules", "floor") if key in changes}
    for place in where.split():
        layout, _, only = place.partition(":")
        layout = "" if layout == "one" else layout
        for kind in [only] if only else KINDS:
            label = "-".join([name, layout or "one", kind, *(["M" + str(given["count"])] if "count" in given else [])])
            layers = {"num_hidden_layers": max(2, 2 * sizes_of(layout)["pp"])}
            made = Case(label, {**layers, **model}, layout, kind, **given, options=changes, slow=slow)
            known = CASES.setdefault(label, made)
            assert replace(known, slow=slow) == made, f"two cases are called {label}"


# -- Llama -------------------------------------------------------------------------------------------------------

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.2, 2.3],
    "original_max_position_embeddings": 20,
    "factor": 3.2,
}
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
MHA = {"num_key_value_heads": 4}
EAGER = {"attn_implementation": "eager"}

add("llama", {}, "tp2:packed cp2:left cp2:packed")
add("llama", {}, "cp2 tp2+pp2+cp2 tp2+cp4 tp2+cp2+dp2 pp2+cp4 cp4+dp2 pp2+cp2+dp2 cp2+dp2 cp4", slow=True)
add("llama across nodes", {}, "cp4:packed tp2+cp2:left pp2+cp2:dense", inter_node_axes=["cp"])
add("llama across nodes", {}, "cp4:dense", slow=True, inter_node_axes=["cp"])
add("llama all-gather", {}, "cp2:packed", cp_method="all_gather")
add("llama all-gather", {}, "cp2:dense", slow=True, cp_method="all_gather")
add("llama mha", MHA, "cp2:dense", slow=True)
add("llama eager", EAGER, "cp2:dense")
add("llama tied", {**TIED, "attention_bias": True}, "cp2:dense", slow=True)
add("llama longrope", {"rope_parameters": LONGROPE}, "cp2:dense")
THREE = {"num_hidden_layers": 3}
ONE = {"num_hidden_layers": 1, **BIASED}
for count in (3, 2, 1, 5):
    rare = count != 3
    add("llama", THREE, "one:left", count=count, slow=rare)
    add("llama", THREE, "tp2:left", count=count, slow=True)
    add("llama mha", {**THREE, **MHA}, "tp4:left", count=count, slow=True)
    add("llama mha tied", {**THREE, **MHA, **TIED}, "one:left tp2:left tp4:left", count=count, slow=True)
    add("llama one layer biases", ONE, "one:left", count=count, slow=True)
    add("llama one layer biases", ONE, "tp2:left", count=count, slow=rare)
    add("llama one layer mha biases", {**ONE, **MHA}, "tp4:left", count=count, slow=True)
    # Its rows without any key average over all keys, so padding of ours must not be among them.
    add("llama eager", {**THREE, **EAGER}, "one:left", count=count, slow=True)
    add("llama eager", {**THREE, **EAGER}, "tp2:left", count=count, slow=rare)
    add("llama mha eager", {**THREE, **EAGER, **MHA}, "tp4:left", count=count, slow=True)
add("llama a token or two", {"num_hidden_layers": 1}, "tp2:right", lengths=(1, 2, 3))
add("llama six layers", {"num_hidden_layers": 6}, "tp2:left", slow=True, lengths=(17, 9, 13))  # quick in test_plans.py
add("llama mha tied eager", {**TIED, **MHA, **EAGER}, "tp2:right", lengths=(15, 7))
add("llama tied biases", {**TIED, **BIASED}, "tp2:dense", count=2, slow=True)


def add_pipelines(layout: str, tied: bool, *counts: int) -> None:
    """Fewer micro-batches than ranks, as many, more and many, under both schedules of the fold; `counts` are quick."""
    pp = sizes_of(layout)["pp"]
    model = {"num_hidden_layers": max(3, 2 * pp + 1), "tie_word_embeddings": tied}
    name = "llama tied pipeline" if tied else "llama pipeline"
    for count in sorted({1, 2, max(1, pp - 1), pp, pp + 1, 3 * pp}):
        slow = count not in counts
        add(name, model, f"{layout}:dense", slow, count=count, schedules=BOTH, lengths=(9, 5, 8))


add_pipelines("pp2", False, 1, 2)  # and of three micro-batches in test_plans.py
add_pipelines("tp2+pp2", False, 3)
for layout in ("pp2+dp2", "pp4", "tp2", "dp2", "tp2+dp2", "tp2+pp4", "pp4+dp2", "tp2+pp2+dp2"):
    add_pipelines(layout, False)
for layout in ("pp2", "tp2+pp2", "pp2+dp2", "pp4", "tp2", "dp2", "tp2+dp2", "tp2+pp4", "pp4+dp2", "tp2+pp2+dp2"):
    add_pipelines(layout, True)

# -- relatives of Llama ------------------------------------------------------------------------------------------

add("mistral", {"family": "mistral"}, "pp2:packed")
for family in ("mistral", "qwen2", "qwen3"):
    add(family, {"family": family}, "tp2 pp2 cp2 tp2+cp2 pp2+cp2 tp2+pp2 tp2+dp2", slow=True)
add("qwen3 eager", {"family": "qwen3", **EAGER}, "tp2:right", slow=True)
for family in ("mistral", "qwen2", "qwen3"):
    add(f"{family} eager", {"family": family, **EAGER}, "tp2 cp2", slow=True)


def add_windows(where: str, *windows: int, slow: bool = False, **options: Any) -> None:
    """Sliding windows; parts of a sequence are 9, 4 and 6 tokens: within one, over two, over three, over everything."""
    for window in windows:
        method = options.get("cp_method", "ring")
        add(f"mistral {window} {method}", {"family": "mistral", "sliding_window": window}, where, slow, **options)


add_windows("cp2:packed", 3)
add_windows("cp2:left", 15, slow=True)
add_windows("cp2:dense", 64, slow=True)
add_windows("cp2:dense", 3, cp_method="all_gather")
add_windows("cp2 cp4", 3, 7, 15, 64, slow=True)
add_windows("cp2 cp4", 3, 7, 15, 64, slow=True, cp_method="all_gather")

# -- GPT-2 and GPT-NeoX --------------------------------------------------------------------------------------------

ALMOST_NONE = 1e-30  # dropout that is declared and drops nothing
GPT2: dict[str, Any] = {"family": "gpt2"}
NEOX: dict[str, Any] = {"family": "gpt_neox"}
SCALED = {**EAGER, "reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}
GPTS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 eager": {**GPT2, **EAGER, "tie_word_embeddings": False, "scale_attn_weights": False},
    "gpt2 upcast": {**GPT2, **SCALED},
    "gpt2 dropout modules": {**GPT2, "resid_pdrop": ALMOST_NONE, "embd_pdrop": ALMOST_NONE},
    "neox": NEOX,
    "neox eager": {**NEOX, **EAGER, "attention_bias": False},
    "neox dropout modules": {**NEOX, "hidden_dropout": ALMOST_NONE},
    "neox in turn": {**NEOX, **TIED, "use_parallel_residual": False},
}
add("gpt2", GPT2, "pp2:dense cp2:packed")
add("neox", NEOX, "pp2:right cp2:left", slow=True)
for name, model in GPTS.items():
    add(name, model, "tp2:left", slow=name not in ("gpt2", "gpt2 eager"))
    add(name, model, "dp2 tp4 tp2+pp2 tp2+cp2 pp2+cp2", slow=True)
    add(f"{name} all-gather", model, "cp2", slow=True, cp_method="all_gather")

# -- mixtures of experts -------------------------------------------------------------------------------------------

MIXTURES = ("mixtral", "phimoe", "qwen3_moe")
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}

BALANCED_PHIMOE = {"family": "phimoe", **BALANCED}
add("phimoe balanced", BALANCED_PHIMOE, "dp2+ep2:left cp2:dense")
add("phimoe balanced", BALANCED_PHIMOE, "tp2+dp2+ep2:right pp2+dp2+ep2:right dp4+ep2:right")
add("phimoe balanced", BALANCED_PHIMOE, "pp2:packed cp2+dp2+ep2:right", slow=True)
add("phimoe", {"family": "phimoe"}, "tp2:right")
DENSE_BETWEEN = {"family": "qwen3_moe", "num_hidden_layers": 3, "mlp_only_layers": [1], **BALANCED}
add("qwen3_moe balanced, dense between", DENSE_BETWEEN, "dp2+ep2:left", slow=True)
for all_to in ((3, 2), (1,)):  # so that some ranks get no token
    model = {"family": "mixtral", "all_to": all_to, "num_experts_per_tok": len(all_to), **BALANCED}
    add(f"mixtral all to {all_to}", model, "dp2+ep2:dense", slow=all_to != (1,))
    add(f"mixtral all to {all_to}", model, "dp4+ep4:dense", slow=True)
EXPERT_LAYOUTS = "dp2+ep2 tp2 pp2 cp2 dp4+ep4 dp4+ep2 tp2+dp2+ep2 pp2+dp2+ep2 cp2+dp2+ep2"
EXPERT_LAYOUTS += " tp2+pp2+dp2+ep2 pp2+cp2+dp2+ep2"
for family in MIXTURES:
    add(family, {"family": family}, EXPERT_LAYOUTS, slow=True)
    add(f"{family} balanced", {"family": family, **BALANCED}, EXPERT_LAYOUTS, slow=True)

# -- recompute -----------------------------------------------------------------------------------------------------

for mode in ("selective", "full"):
    add(f"llama {mode}", {}, "tp2:left", slow=True, recompute=mode)
    add(f"llama mha {mode}", MHA, "tp4:right", slow=True, recompute=mode)
    add(f"llama {mode}", {}, "tp2+cp2:right", slow=True, recompute=mode)
    add(f"gpt2 {mode}", GPT2, "tp2+pp2:right", slow=True, recompute=mode)
    add(f"llama all-gather {mode}", {}, "pp2+cp2:right", slow=True, recompute=mode, cp_method="all_gather")
    for family, layout in (("mixtral", "dp2+ep2"), ("qwen3_moe", "tp2+dp2+ep2"), ("phimoe", "cp2+dp2+ep2")):
        add(f"{family} {mode}", {"family": family}, f"{layout}:right", slow=True, recompute=mode)
    logits = {"family": "mixtral", "output_router_logits": True}
    add(f"mixtral router logits {mode}", logits, "pp2+dp2+ep2:right", slow=True, recompute=mode)
    add(f"mistral {mode}", {"family": "mistral"}, "cp4:right", slow=True, recompute=mode)


# -- derived families ----------------------------------------------------------------------------------------------


def add_derived(name: str, where: str, slow: bool = False, **changes: Any) -> None:
    """Add cases of a derived model.

    Args:
        name: a function of `support.derived_models`, and a word for what is changed.
        where: see `add`.
        slow: see `add`.
        changes: to the model, `recompute` and `cp_recurrence` of `HelixConfig`, `lengths` and `floor`.
    """
    names = ("recompute", "cp_recurrence", "lengths", "floor")
    options = {key: changes.pop(key) for key in names if key in changes}
    add(f"derived {name}", {"family": f"{HOME}{name.split()[0]}", **changes}, where, slow, **options)


add_derived("gemma3", "tp2:packed", slow=True)
add_derived("phi3", "tp2:left", slow=True)  # fused projections whose blocks differ in length
# The rules of these are proven on small modules, too: tests/unit/models/derived.
add_derived("olmo2", "tp2:left", slow=True)  # sums over ranks within a norm
add_derived("deepseek_v3", "tp2:left", slow=True)  # linears of which every rank has a copy
add_derived("bitnet", "tp2:left", slow=True)
for name in ("bitnet", "modernbert"):
    add_derived(name, "tp2 pp2", slow=True)
for name in ("gemma2", "gemma3", "phi3", "olmo2", "gpt_oss", "deepseek_v3", "qwen2_moe"):
    add_derived(name, "tp2 pp2 tp2+pp2:left", slow=True)
    for mode in ("selective", "full"):
        add_derived(f"{name} {mode}", "tp2:left", slow=True, recompute=mode)
for name in ("gpt_oss", "qwen2_moe"):
    add_derived(f"{name} balanced", "dp2+ep2 tp2 pp2 tp2+dp2+ep2:left pp2+dp2+ep2:right", slow=True, **BALANCED)
add_derived("qwen2_moe balanced", "cp2", slow=True, **BALANCED)
for name in ("gemma3", "phi3", "olmo2", "qwen2_moe", "deepseek_v3"):
    add_derived(f"{name} eager", "tp2:left", slow=True, **EAGER)
add_derived("gemma2 untied", "tp2:dense pp2:dense", slow=True, tie_word_embeddings=False)
add_derived("phi3 tied", "tp2:dense pp2:dense", slow=True, **TIED)

HYBRID = {"lengths": (70, 9, 13), "floor": 1e-8}  # over a chunk of a recurrence; steps of time hardly matter so early
add_derived("qwen3_5", "tp2:left cp2:left", **HYBRID)
for name in HYBRIDS:
    add_derived(name, "tp2:left tp2:dense pp2:packed cp2:left", slow=True, **HYBRID)
for name in ("qwen3_next", "nemotron_h", "lfm2"):
    add_derived(name, "tp2+pp2:left tp2+dp2:right tp2+cp2:left cp2:right cp2:packed cp4", slow=True, **HYBRID)
    for mode in ("selective", "full"):
        add_derived(f"{name} {mode}", "tp2:left cp2:left", slow=True, recompute=mode, **HYBRID)
for name in ("qwen3_next", "kimi_linear"):
    places = "cp2:left cp2:packed tp2+cp2:left cp4:right"
    add_derived(f"{name} states", places, slow=True, cp_recurrence="states", **HYBRID)
add_derived("qwen3_5 states", "cp2:left", slow=True, cp_recurrence="states", recompute="selective", **HYBRID)
SHARED_KEYS = {"num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
add_derived("qwen3_next shared keys", "tp4:left", slow=True, **HYBRID, **SHARED_KEYS)
for name in ("qwen3_5_moe", "nemotron_h", "granite_moe_hybrid"):
    add_derived(name, "dp2+ep2:left tp2+dp2+ep2:right", slow=True, **HYBRID)


def parameters(*names: str, slow: Sequence[str] = ()) -> list[Any]:
    """What `pytest.mark.parametrize` takes: the cases of these names, or all, each with its mark.

    Cases that need the same processes and the same trainer follow each other.
    """
    chosen = [CASES[name] for name in (*names, *slow)] or list(CASES.values())
    trainers: dict[str, list[Case]] = {}
    for case in chosen:
        trainers.setdefault(repr((case.helix, case.ranks, case.model)), []).append(case)
    return [
        marks.slow(case, when=case.slow or case.name in slow, id=case.name)
        for cases in trainers.values()
        for case in cases
    ]


def layouts_by_class() -> dict[str, set[str]]:
    """The layouts on which each declared class is compared with the unsplit model, one process left out."""
    result: dict[str, set[str]] = {}
    for case in CASES.values():
        family = case.model.get("family", "llama")
        if case.layout and family in FAMILIES:
            made = FAMILIES[family].__annotations__["return"]
            result.setdefault(made.__name__, set()).add(case.layout)
    return result
