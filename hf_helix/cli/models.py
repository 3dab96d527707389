"""hf-helix models: which model classes are supported, and on which layouts each was tested.

In:   nothing.
Out:  text.
Must hold: `SUPPORTED` names every registered class and exactly the layouts that tests compare with the unsplit model
or the stock Trainer; a test holds it. It is the one list: docs/support.md is generated from it.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hf_helix.cli.options import add_parser

if TYPE_CHECKING:
    from hf_helix.cli.options import Commands

AXES = ("tp", "pp", "cp", "dp", "ep")  # in the order in which layouts name them


class Model(NamedTuple):
    """A class of Transformers.

    Args:
        checkpoint: one on the Hugging Face Hub, for example; tests use small models of the same class.
        layouts: those that tests compare, such as `tp2+dp2`.
    """

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
    "LlamaForCausalLM": Model("meta-llama/Llama-3.1-8B", LLAMA),
    "MistralForCausalLM": Model("mistralai/Mistral-7B-v0.3", DENSE),
    "Qwen2ForCausalLM": Model("Qwen/Qwen2.5-7B", DENSE),
    "Qwen3ForCausalLM": Model("Qwen/Qwen3-8B", DENSE),
    "GPT2LMHeadModel": Model("openai-community/gpt2", GPT),
    "GPTNeoXForCausalLM": Model("EleutherAI/pythia-1b", GPT),
    "MixtralForCausalLM": Model("mistralai/Mixtral-8x7B-v0.1", MIXTURE),
    "PhimoeForCausalLM": Model("microsoft/Phi-3.5-MoE-instruct", MIXTURE),
    "Qwen3MoeForCausalLM": Model("Qwen/Qwen3-30B-A3B", MIXTURE),
}

LEGEND = """\
tp: tensor and sequence parallelism (tp_size), pp: pipeline (pp_size), cp: context parallelism (cp_size), ep: expert
parallelism (ep_size), dp: data parallelism, which takes the processes that are left. ep takes its ranks from dp.
On each of these layouts tests compare small models of the class with the unsplit Transformers model or the stock
Trainer, losses and every gradient, on CPU with gloo. Nothing has run on a GPU yet. Other sizes are accepted where they
divide the heads, layers and experts. What else is tested: docs/support.md; how to add a class: docs/adding_a_model.md.
"""


def layout_name(sizes: Mapping[str, int]) -> str:
    """The axes of more than one rank, such as `tp2+dp2`."""
    return "+".join(f"{axis}{sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1)


def add_command(commands: Commands) -> None:
    """Declare the command."""
    summary = "list the model classes that are supported, and the layouts on which each was tested"
    add_parser(commands, "models", run, summary, LEGEND)


def run(options: argparse.Namespace) -> None:
    """A line for each class, continued where its layouts need more."""
    for name, model in SUPPORTED.items():
        head = f"{name:<20} {model.checkpoint:<31} "
        layouts = textwrap.wrap(" ".join(model.layouts), 119 - len(head), break_on_hyphens=False)
        print(head + f"\n{' ' * len(head)}".join(layouts))
    print(f"\n{LEGEND}", end="")
