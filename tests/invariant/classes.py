"""The equivalence classes: one table of the runs that must give what the unsplit Transformers model gives.

In:   nothing.
Out:  `CASES`, by name. Those with one model and one batch are a class: they share one run of the unsplit model.
Must hold: every model class of the package stands here with every layout that `hf-helix models` names.
"""

import itertools
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


def add(name: str, model: Mapping[str, Any], where: str, slow: bool = True, **changes: Any) -> None:
    """Add cases of a model; a case that is there already stays as it is.

    Args:
        name: of the model, in reports.
        where: the layouts, each with the kind of its batches, such as `tp2:left pp2:packed`; layouts without a kind
            have one kind after another.
        slow: among the tests that take minutes.
        changes: to the other attributes of `Case`; what is none of them is an option of `HelixConfig`.
    """
    given = {key: changes.pop(key) for key in ("count", "lengths", "schedules", "floor") if key in changes}
    for place, next_kind in zip(where.split(), itertools.cycle(KINDS), strict=False):
        layout, _, kind = place.partition(":")
        layout, kind = "" if layout == "one" else layout, kind or next_kind
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
THREE = {"num_hidden_layers": 3}

add("llama", {}, "tp2:packed cp2:left cp2:packed", slow=False)
add("llama", {}, "tp2 cp2 dp2 cp4 cp2+dp2 cp4+dp2 tp2+dp2 tp2+cp2 tp2+cp4 pp2+cp2 pp2+cp4 pp2+dp2 pp4+dp2 tp2+pp4")
add("llama", {}, "tp2+pp2+cp2 tp2+pp2+dp2 tp2+cp2+dp2 pp2+cp2+dp2")
add("llama across nodes", {}, "cp4:packed tp2+cp2:left pp2+cp2:dense", slow=False, inter_node_axes=["cp"])
add("llama all-gather", {}, "cp2:packed", slow=False, cp_method="all_gather")
add("llama all-gather", {}, "cp2:left tp2+cp2 pp2+cp2 cp4", cp_method="all_gather")
add("llama eager", EAGER, "cp2:dense", slow=False)
add("llama longrope", {"rope_parameters": LONGROPE}, "cp2:dense", slow=False)
add("llama", THREE, "one:left", slow=False, count=3)
add("llama one layer biases", {"num_hidden_layers": 1, **BIASED}, "tp2:left", slow=False, count=3)
# Its rows without any key average over all keys, so padding of ours must not be among them.
add("llama eager", {**THREE, **EAGER}, "tp2:left", slow=False, count=3)
add("llama mha tied eager", {**TIED, **MHA, **EAGER}, "tp2:right", slow=False, lengths=(15, 7))
add("llama a token or two", {"num_hidden_layers": 1}, "tp2:right", slow=False, lengths=(1, 2, 3))
add("llama six layers", {"num_hidden_layers": 6}, "tp2:left", lengths=(17, 9, 13))  # quick in test_plans.py
add("llama mha tied", {**MHA, **TIED}, "tp4:left cp4:right", count=5)
ONE_KEY = {"num_key_value_heads": 1}  # which ranks share
add("llama one key", {"num_hidden_layers": 1, **ONE_KEY}, "tp2:left", slow=False)
add("llama one key", ONE_KEY, "tp2+pp2:right tp2+cp2:packed tp4:left")


def add_pipelines(layout: str, tied: bool, *counts: int, slow: bool = True) -> None:
    """Under both schedules of the fold, with so many micro-batches. Other layouts and counts: test_random.py."""
    model = {"num_hidden_layers": 2 * sizes_of(layout)["pp"] + 1, "tie_word_embeddings": tied}
    name = "llama tied pipeline" if tied else "llama pipeline"
    for count in counts:
        add(name, model, f"{layout}:dense", slow, count=count, schedules=BOTH, lengths=(9, 5, 8))


add_pipelines("pp2", False, 1, 2, slow=False)  # and of three micro-batches in test_plans.py
add_pipelines("tp2+pp2", False, 3, slow=False)
add_pipelines("pp2", False, 3, 6)
add_pipelines("pp4", False, 1, 3, 5, 12)
for layout in ("pp2", "tp2+pp2", "pp4"):
    add_pipelines(layout, True, 1, 5)

# -- relatives of Llama ------------------------------------------------------------------------------------------

add("mistral", {"family": "mistral"}, "pp2:packed", slow=False)
for family in ("mistral", "qwen2", "qwen3"):
    add(family, {"family": family}, "tp2 pp2 cp2 tp2+cp2 pp2+cp2 tp2+pp2 tp2+dp2")
    add(f"{family} eager", {"family": family, **EAGER}, "tp2 cp2")


def add_windows(where: str, window: int, slow: bool = True, **options: Any) -> None:
    """Sliding windows; parts of a sequence are 9, 4 and 6 tokens: within one, over two, over three, over everything."""
    method = options.get("cp_method", "ring")
    add(f"mistral {window} {method}", {"family": "mistral", "sliding_window": window}, where, slow, **options)


add_windows("cp2:packed", 3, slow=False)
add_windows("cp2:dense", 3, slow=False, cp_method="all_gather")
for window in (3, 7, 15, 64):
    add_windows("cp2:left cp4:packed", window)
    add_windows("cp2:right cp4:packed", window, cp_method="all_gather")

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
add("gpt2", GPT2, "pp2:dense cp2:packed", slow=False)
for name, model in GPTS.items():
    add(name, model, "tp2:left", slow=name not in ("gpt2", "gpt2 eager"))
    add(name, model, "tp2+cp2:packed")
for name in ("gpt2", "neox"):
    add(name, GPTS[name], "dp2 tp4 tp2+pp2 pp2+cp2 pp2:right cp2:left")
    add(f"{name} all-gather", GPTS[name], "cp2:right", cp_method="all_gather")

# -- mixtures of experts -------------------------------------------------------------------------------------------

MIXTURES = ("mixtral", "phimoe", "qwen3_moe")
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}

BALANCED_PHIMOE = {"family": "phimoe", **BALANCED}
add("phimoe balanced", BALANCED_PHIMOE, "dp2+ep2:left cp2:dense", slow=False)
add("phimoe balanced", BALANCED_PHIMOE, "tp2+dp2+ep2:right pp2+dp2+ep2:right dp4+ep2:right", slow=False)
add("phimoe", {"family": "phimoe"}, "tp2:right", slow=False)
add("phimoe one key", {"family": "phimoe", **ONE_KEY}, "tp2:right tp2+dp2+ep2:left")
DENSE_BETWEEN = {"family": "qwen3_moe", **THREE, "mlp_only_layers": [1], **BALANCED}
add("qwen3_moe balanced, dense between", DENSE_BETWEEN, "dp2+ep2:left")
for all_to in ((3, 2), (1,)):  # so that some ranks get no token
    model = {"family": "mixtral", "all_to": all_to, "num_experts_per_tok": len(all_to), **BALANCED}
    add(f"mixtral all to {all_to}", model, "dp2+ep2:dense", slow=all_to != (1,))
    add(f"mixtral all to {all_to}", model, "dp4+ep4:dense")
EXPERT_LAYOUTS = "dp2+ep2 tp2 pp2 cp2 dp4+ep4 dp4+ep2 tp2+dp2+ep2 pp2+dp2+ep2 cp2+dp2+ep2"
EXPERT_LAYOUTS += " tp2+pp2+dp2+ep2 pp2+cp2+dp2+ep2"
for family in MIXTURES:
    add(family, {"family": family}, "dp2+ep2 tp2")
    add(f"{family} balanced", {"family": family, **BALANCED}, EXPERT_LAYOUTS)
add("mixtral adapters", {"family": "mixtral", **BALANCED, "lora": {}}, EXPERT_LAYOUTS)

# -- recompute: the bits of a run without it on one axis, see test_recompute_bits.py -------------------------------

for mode in ("selective", "full"):
    add(f"gpt2 {mode}", GPT2, "tp2+pp2:right", recompute=mode)
    add(f"llama all-gather {mode}", {}, "pp2+cp2:right", recompute=mode, cp_method="all_gather")
    add(f"phimoe {mode}", {"family": "phimoe", "output_router_logits": True}, "cp2+dp2+ep2:right", recompute=mode)
    add(f"mixtral adapters {mode}", {"family": "mixtral", **BALANCED, "lora": {}}, "dp2+ep2:right", recompute=mode)
    add(f"mistral {mode}", {"family": "mistral"}, "cp4:right", recompute=mode)


# -- derived families ----------------------------------------------------------------------------------------------


def add_derived(name: str, where: str, slow: bool = True, **changes: Any) -> None:
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


# Rules of derivation are proven on small modules, too: tests/unit/models/derived.
for name in ("gemma2", "gemma3", "phi3", "olmo2", "gpt_oss", "deepseek_v3", "qwen2_moe", "bitnet", "modernbert"):
    add_derived(name, "tp2:left pp2:packed")
for name in ("gemma3", "olmo2", "qwen2_moe", "deepseek_v3"):
    add_derived(name, "tp2+pp2:left tp2:packed")
    add_derived(f"{name} eager", "tp2:left", **EAGER)
    for mode in ("selective", "full"):
        add_derived(f"{name} {mode}", "tp2:left", recompute=mode)
for name in ("gpt_oss", "qwen2_moe"):
    add_derived(f"{name} balanced", "dp2+ep2 tp2 pp2 cp2 tp2+dp2+ep2:left pp2+dp2+ep2:right", **BALANCED)
add_derived("gemma2 untied", "tp2:dense pp2:dense", tie_word_embeddings=False)
add_derived("phi3 tied", "tp2:dense pp2:dense", **TIED)

HYBRID = {"lengths": (70, 9, 13), "floor": 1e-8}  # over a chunk of a recurrence; steps of time hardly matter so early
add_derived("qwen3_5", "tp2:left", slow=False, **HYBRID)
for name in HYBRIDS:
    add_derived(name, "tp2:left cp2:left", **HYBRID)
for name in ("qwen3_next", "nemotron_h", "lfm2"):
    add_derived(name, "pp2:packed tp2+pp2:left tp2+dp2:right tp2+cp2:left cp2:packed cp4:right", **HYBRID)
    add_derived(f"{name} full", "tp2:left cp2:left", recompute="full", **HYBRID)
for name in ("qwen3_next", "kimi_linear"):
    places = "cp2:left cp2:packed tp2+cp2:left cp4:right"
    add_derived(f"{name} states", places, cp_recurrence="states", **HYBRID)
add_derived("qwen3_5 states", "cp2:left", cp_recurrence="states", recompute="selective", **HYBRID)
SHARED_KEYS = {"num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
add_derived("qwen3_next shared keys", "tp4:left", **HYBRID, **SHARED_KEYS)
for name in ("qwen3_5_moe", "nemotron_h", "granite_moe_hybrid"):
    add_derived(name, "tp2+dp2+ep2:right", **HYBRID)


def parameters() -> list[Any]:
    """All cases with their marks, for `pytest.mark.parametrize`.

    Cases that need the same processes and the same trainer follow each other.
    """
    trainers: dict[str, list[Case]] = {}
    for case in CASES.values():
        trainers.setdefault(repr((case.helix, case.ranks, case.model)), []).append(case)
    return [marks.slow(case, when=case.slow, id=case.name) for cases in trainers.values() for case in cases]


def layouts_by_class() -> dict[str, set[str]]:
    """The layouts on which each declared class is compared with the unsplit model, one process left out."""
    result: dict[str, set[str]] = {}
    for case in CASES.values():
        family = case.model.get("family", "llama")
        if case.layout and family in FAMILIES:
            made = FAMILIES[family].__annotations__["return"]
            result.setdefault(made.__name__, set()).add(case.layout)
    return result
