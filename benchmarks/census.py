"""Proves every causal-LM class of the installed Transformers: `python -m benchmarks.census`.

In:   names of classes; without any, all of them.
Out:  the census (`hf_helix/models/stock/census.json`): for each class and layout whether a small cut model of the class
    equals its unsplit self, why it is refused, or what differs. A line for each class while it runs.
Must hold: a class that fails, hangs or ends its processes does not end the census; what a run has found stays in the
file, and the next run goes on from there.

Then `make docs` writes the table of docs/models.md.
"""

import argparse
import datetime
import re
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_helix.cli.models import describe, headline
from hf_helix.engine.proof.prove import Subject, has_experts
from hf_helix.engine.proof.verdict import Proof
from hf_helix.models.small_config import without_dropout
from hf_helix.models.stock.causal_lm import causal_lm_classes, classifier_classes, text_classes
from hf_helix.models.stock.census import (
    ADAPTERS,
    CLASSIFIER,
    FAILED,
    FILE,
    PROVEN,
    REFUSED,
    TEXT,
    Census,
    Finding,
    format_census,
    installed_versions,
    read_census,
)
from hf_helix.testing import prove_layouts

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2},
}

SAMPLE = (
    *("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"),
    *("Olmo2ForCausalLM", "SmolLM3ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "MambaForCausalLM"),
)
"""Classes that differ in most ways that there are."""

DROPOUT = {"attention_dropout": 0.1}
SPARSE = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "output_router_logits": True}
GEMMA4_EXPERTS = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "BambaForCausalLM": ({"attn_layer_indices": [9, 18, 27]},),
    "CohereForCausalLM": ({"use_qk_norm": True},),
    "FalconForCausalLM": ({"new_decoder_architecture": True},),
    "GPT2LMHeadModel": ({"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},),
    "Gemma3ForCausalLM": ({"final_logit_softcapping": 5.0}, {"num_key_value_heads": 1}),
    "Gemma4ForCausalLM": (
        {"hidden_size_per_layer_input": 0},
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
        {"hidden_size_per_layer_input": 0, "enable_moe_block": True, **GEMMA4_EXPERTS},
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
    "GemmaForCausalLM": ({"num_key_value_heads": 1},),
    "GPTBigCodeForCausalLM": ({"multi_query": False},),
    "GraniteMoeSharedForCausalLM": ({"shared_intermediate_size": 32},),
    "HunYuanMoEV1ForCausalLM": ({"head_dim": 128, "num_experts": 16, "moe_topk": [2] * 32},),
    "JambaForCausalLM": ({"num_experts": 1, "num_experts_per_tok": 1},),
    "Lfm2MoeForCausalLM": ({"layer_types": ["conv", "conv", "full_attention", "conv"] * 8, "num_dense_layers": 2},),
    "OPTForCausalLM": ({"word_embed_proj_dim": 512, "do_layer_norm_before": False}, {"dropout": 0.1}),
    "OlmoForCausalLM": ({"clip_qkv": 0.1},),
    "PhiForCausalLM": ({"qk_layernorm": True},),
    "Qwen2MoeForCausalLM": (SPARSE,),
    "Qwen3MoeForCausalLM": (SPARSE,),
    "Qwen2ForCausalLM": ({"use_sliding_window": True, "max_window_layers": 1},),
    "SeedOssForCausalLM": (DROPOUT,),
    "Starcoder2ForCausalLM": (DROPOUT,),
    "XGLMForCausalLM": (DROPOUT,),
    "StableLmForCausalLM": ({"qk_layernorm": True}, {"use_parallel_residual": True}),
}
"""Options that published models of a class have and its defaults leave off; each is a subject of its own."""

LONGEST_REASON = 300


def main() -> None:
    options = read_options()
    census = read_census(options.out)
    if not census.is_current:
        census = Census(installed_versions())
    names = options.only or (SAMPLE if options.sample else subjects())
    asked = options.layouts or list(LAYOUTS)
    quiet()
    for place, name in enumerate(names, 1):
        before = census.classes.get(name, {})
        kept = {
            layout: finding
            for layout, finding in before.items()
            if layout not in asked or not (options.anew or (options.again and finding.status != PROVEN))
        }
        started = time.monotonic()
        findings = {**kept, **take(name, [layout for layout in asked if layout not in kept], options.timeout)}
        findings = {layout: findings[layout] for layout in LAYOUTS if layout in findings}
        if findings != before:
            today = datetime.date.today().isoformat()
            census = replace(census, date=today, classes={**census.classes, name: findings})
            write(options.out, census)
        print(f"{place}/{len(names)} {name}: {describe(findings)} ({time.monotonic() - started:.0f} s)", flush=True)
    print(headline(census))


def read_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CLASS", choices=subjects(), help="these classes")
    parser.add_argument("--sample", action="store_true", help=f"{len(SAMPLE)} classes that differ much")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="these layouts; without it, all that apply")
    parser.add_argument("--again", action="store_true", help="also what was refused or failed before")
    parser.add_argument("--anew", action="store_true", help="everything, whatever was found before")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a layout may take")
    parser.add_argument("--out", type=Path, default=FILE, help="the file that is read and written")
    return parser.parse_args()


def take(name: str, layouts: list[str], timeout: float) -> dict[str, Finding]:
    """Returns the findings for a class.

    Args:
        name: the class.
        layouts: those that are to be proven; `ep2` is left out for models without experts.
        timeout: the seconds that a layout may take.
    """
    if not layouts:
        return {}
    try:
        subject = subject_of(name)
        model = subject.build()
        run_unsplit(model, is_classifier=name.endswith(CLASSIFIER))
    except Exception as error:
        because = f"the unsplit model does not train on token ids alone: {type(error).__name__}: {error}"
        return {layout: Finding(REFUSED, short(because)) for layout in layouts if layout != "ep2"}
    layouts = [layout for layout in layouts if layout != "ep2" or has_experts(model)]
    proofs = prove_layouts(subject, [LAYOUTS[layout] for layout in layouts], timeout=timeout)
    return {layout: finding_of(proof) for layout, proof in zip(layouts, proofs, strict=True)}


def subjects() -> list[str]:
    """Returns the names of all classes, each followed by those of its variants; mixtures are the ones of the last
    census."""
    causal = [f"{name}{options}" for name in causal_lm_classes() for options in ("", *variants(name))]
    others: dict[str, Iterable[str]] = {TEXT: text_classes(), CLASSIFIER: classifier_classes()}
    others[ADAPTERS] = [name for name, found in read_census().classes.items() if "ep2" in found and "[" not in name]
    return [*causal, *(f"{name}{kind}" for kind, names in others.items() for name in sorted(names))]


def variants(name: str) -> dict[str, dict[str, Any]]:
    """Returns the options of the variants of a class by what their names end with."""
    return {f"[{', '.join(f'{key}={value}' for key, value in v.items())}]": v for v in VARIANTS.get(name, ())}


def subject_of(name: str) -> Subject:
    """Returns what is proven under a name of `subjects`."""
    name, bracket, options = name.partition("[")
    subject = Subject.of(name)
    if not bracket or f"{bracket}{options}" in (TEXT, CLASSIFIER, ADAPTERS):
        return replace(subject, adapts_experts=f"{bracket}{options}" == ADAPTERS)
    assert subject.kind is not None
    given = variants(name)[bracket + options]
    return replace(subject, config=without_dropout(subject.kind.config_class(**given), kept=given))


def run_unsplit(model: Any, is_classifier: bool = False) -> None:
    """Runs the unsplit model forward and backward on token ids and labels: of tokens, or of a row for a classifier."""
    ids = torch.randint(3, 100, (1 if is_classifier else 2, 12), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids.new_zeros(1) if is_classifier else ids).loss
    loss.backward()
    if not loss.isfinite():
        raise ValueError(f"its loss is {float(loss)}")


def finding_of(proof: Proof) -> Finding:
    """Returns what a proof comes to."""
    if proof.ok:
        return Finding(PROVEN)
    if proof.refusal:
        return Finding(REFUSED, short(reason_of(proof)))
    figures = re.sub(r"; \d+ s\)", ")", str(proof).partition(": ")[2])
    return Finding(FAILED, short(figures.removeprefix("failed: ")))


def reason_of(proof: Proof) -> str:
    """Returns why a layout is refused, without the name of the class and without advice, which are those of all."""
    return proof.refusal.removeprefix(f"{proof.model} cannot be derived: ").partition("; describe its decoder")[0]


def short(text: str) -> str:
    """Returns a reason in one line of limited length."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


def write(path: Path, census: Census) -> None:
    """Writes the file anew; whoever reads it finds the old text or the new one."""
    draft = path.with_suffix(".draft")
    draft.write_text(format_census(census))
    draft.replace(path)


def quiet() -> None:
    """Leaves out what Transformers says about small configurations."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with suppress(RuntimeError):
        torch.set_num_threads(1)


if __name__ == "__main__":
    main()
