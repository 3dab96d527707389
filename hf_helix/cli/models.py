"""hf-helix models: the supported model classes, and the layouts of their tests.

In:   part of the name of a class, or nothing; the census (`hf_helix.models.stock.census`).
Out:  text.
Must hold: `SUPPORTED` names every declared class and exactly the layouts whose results tests compare with the unsplit
model or the stock Trainer; docs/support.md is generated from the list. Findings of the census are printed unchanged.
"""

import difflib
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from hf_helix.cli.options import Command, argument
from hf_helix.models.stock.census import ADAPTERS, CLASSIFIER, PROVEN, TEXT, Census, Findings, instead_of, read_census


class SupportedModel(NamedTuple):
    """A class of Transformers: for example a checkpoint of the class on the Hub, and the layouts that tests compare."""

    checkpoint: str
    layouts: tuple[str, ...]


LLAMA = (
    *("tp2", "tp4", "pp2", "pp4", "cp2", "cp4", "dp2"),
    *("tp2+pp2", "tp2+pp4", "tp2+cp2", "tp2+cp4", "tp2+dp2", "pp2+cp2", "pp2+cp4", "pp2+dp2", "pp4+dp2"),
    *("cp2+dp2", "cp4+dp2", "tp2+pp2+cp2", "tp2+pp2+dp2", "tp2+cp2+dp2", "pp2+cp2+dp2"),
)
DENSE = ("tp2", "pp2", "cp2", "tp2+pp2", "tp2+cp2", "tp2+dp2", "pp2+cp2")
GPT = ("tp2", "tp4", "pp2", "cp2", "dp2", "tp2+pp2", "tp2+cp2", "pp2+cp2")
MIXTURE = (
    *("tp2", "pp2", "cp2", "dp2+ep2", "dp4+ep2", "dp4+ep4"),
    *("tp2+dp2+ep2", "pp2+dp2+ep2", "cp2+dp2+ep2", "tp2+pp2+dp2+ep2", "pp2+cp2+dp2+ep2"),
)

SUPPORTED = {
    "LlamaForCausalLM": SupportedModel("meta-llama/Llama-3.1-8B", LLAMA),
    "MistralForCausalLM": SupportedModel("mistralai/Mistral-7B-v0.3", DENSE),
    "Qwen2ForCausalLM": SupportedModel("Qwen/Qwen2.5-7B", DENSE),
    "Qwen3ForCausalLM": SupportedModel("Qwen/Qwen3-8B", DENSE),
    "GPT2LMHeadModel": SupportedModel("openai-community/gpt2", GPT),
    "GPTNeoXForCausalLM": SupportedModel("EleutherAI/pythia-1b", GPT),
    "MixtralForCausalLM": SupportedModel("mistralai/Mixtral-8x7B-v0.1", MIXTURE),
    "PhimoeForCausalLM": SupportedModel("microsoft/Phi-3.5-MoE-instruct", MIXTURE),
    "Qwen3MoeForCausalLM": SupportedModel("Qwen/Qwen3-30B-A3B", MIXTURE),
}

LEGEND = """\
tp: tensor and sequence parallelism (tp_size), pp: pipeline (pp_size), cp: context parallelism (cp_size), ep: expert
parallelism (ep_size), dp: data parallelism, which takes the processes that are left. ep takes its ranks from dp.
On each of these layouts tests compare small models of the class with the unsplit Transformers model or the stock
Trainer, losses and every gradient, on CPU with gloo. What has run on a GPU: docs/gpu.md. Other sizes are accepted where
they divide the heads, layers and experts. What else is tested: docs/support.md. Llama, GPT-2 and Phi-MoE are declared;
all others are derived, and proven before their first step: docs/adding_a_model.md.
"""

CENSUS_LEGEND = """\
The census cuts a small model of every causal-LM class of Transformers, with the defaults of its configuration (or with
the options in brackets; [text]: on text alone; [classifier]: up to the head; [LoRA on experts]: with nothing else
trained), and compares losses, every gradient and logits with those of the unsplit model. proven: all
are equal. refused: such a model cannot be trained cut like this, and says so before it starts. failed: it must not be
used. Behind -> stands what to do instead. `hf-helix check NAME` compares a class or a checkpoint's own configuration
here and now.
"""


@dataclass(kw_only=True)
class ModelsCommand(Command):
    """List the supported model classes, and the layouts of their tests."""

    epilog = LEGEND + CENSUS_LEGEND
    name: str = argument("", "only classes that have this in their names, such as gemma")

    def run(self) -> None:
        """Prints a line for each class, continued if it needs more: the classes that tests compare, then the census."""
        part = self.name.lower()
        declared = {name: model for name, model in SUPPORTED.items() if part in name.lower()}
        for name, model in declared.items():
            print(_wrapped(f"{name:<20} {model.checkpoint:<31} ", " ".join(model.layouts)))
        if declared:
            print(f"\n{LEGEND}")
        _print_census(read_census(), part)


def _print_census(census: Census, part: str) -> None:
    """Prints the results of the classes that have a text in their names: first the ones that are proven somewhere."""
    matching = {name: findings for name, findings in census.classes.items() if part in name.lower()}
    if part and not matching:
        names = {name.lower(): name for name in census.classes}
        near = difflib.get_close_matches(part, names, n=1)
        hint = f"did you mean {names[near[0]]}? " if near else ""
        raise ValueError(
            f"no class has {part!r} in its name; {hint}leave it out for all, or give a part, such as gemma"
        )
    proven = {name for name, found in matching.items() if any(each.status == PROVEN for each in found.values())}
    for name in sorted(matching, key=lambda name: (name not in proven, name)):
        print(_wrapped(f"{name:<34} ", describe(matching[name])))
    print(f"\n{headline(census)}\n{CENSUS_LEGEND}", end="")


def headline(census: Census) -> str:
    """Returns the number of proven classes, with the versions, as a line."""
    if not census.classes:
        return "No census has been taken."
    on_text, classifiers = (len(census.proven_on("tp2", "pp2", kind=kind)) for kind in (TEXT, CLASSIFIER))
    adapted = len(census.proven_on("tp2", "ep2", kind=ADAPTERS))
    more = f", and on text {on_text} classes with towers of images or sound," if on_text else ""
    more += f" and the decoders of {classifiers} sequence classifiers," if classifiers else ""
    adapters = f", and LoRA on the experts of {adapted} mixtures at tp2 and ep2" if adapted else ""
    return (
        f"{len(census.proven_on('tp2', 'pp2'))} of {len(census.names)} causal-LM classes of Transformers "
        f"{census.versions['transformers']}{more} are proven at tp2 and pp2{adapters} "
        f"(torch {census.versions['torch']}, {census.date})"
    )


def describe(findings: Findings) -> str:
    """Returns the findings for a class, layouts of the same finding together, and what to do instead:
    "tp2 pp2 proven; cp2 refused: ... -> ..."."""
    layouts: dict[str, list[str]] = {}
    for layout, (status, reason) in findings.items():
        layouts.setdefault(f"{status}: {reason}" if reason else status, []).append(layout)
    found = "; ".join(f"{' '.join(names)} {text}" for text, names in layouts.items())
    instead = dict.fromkeys(filter(None, (instead_of(reason) for _, reason in findings.values())))
    return f"{found} -> {'; '.join(instead)}" if instead else found


def _wrapped(head: str, text: str) -> str:
    """Returns a line, continued below its second part."""
    if len(head) > 80:  # a name with options; its results stand below it
        return head.rstrip() + "".join(
            f"\n{' ' * 35}{line}" for line in textwrap.wrap(text, 84, break_on_hyphens=False)
        )
    return head + f"\n{' ' * len(head)}".join(textwrap.wrap(text, 119 - len(head), break_on_hyphens=False))
