"""Which eager attention of Transformers is softmax(q k * scaling + mask) v and nothing else, by its code.

Modeling files are not imported, which would take minutes: the functions are compiled from their text.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager
from transformers.models.mistral.modeling_mistral import eager_attention_forward as mistral_eager
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward as qwen3_eager

from hf_helix.models.graph.attention import is_plain_attention
from hf_helix.models.stock.alike import same_code

MODELS = Path(transformers.__file__).parent / "models"
FUNCTION = r"^def {}\(.*?(?=^[^\s)])"
IMPORTS = "from __future__ import annotations\nimport math\nimport torch\nfrom torch import nn"
"""As in the files: Python compiles `torch.matmul(...)` in another way where `torch` is imported by the same file."""
OWN = ["diffusion_gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "t5gemma", "vaultgemma"]
"""Some whose attention has a cap, or sinks."""


def compiled(text: str, name: str, known: dict[str, Any]) -> None:
    """Adds a function of a file to those that are known, if the file has one."""
    result = re.search(FUNCTION.format(name), text + "\nend", re.MULTILINE | re.DOTALL)
    if result is not None:
        exec(compile(f"{IMPORTS}\n{result[0]}", name, "exec"), known)


@functools.cache
def all_of_transformers() -> dict[str, Callable[..., Any]]:
    """The eager attention of every file that has one, by the name of its folder."""
    result = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text, known = path.read_text(), dict[str, Any]()
        if "\ndef eager_attention_forward(" in text:
            for name in ("repeat_kv", "eager_attention_forward"):
                compiled(text, name, known)
            result[f"{path.parent.name}/{path.stem}"] = known["eager_attention_forward"]
    return result


def test_most_models_have_copies_of_llamas() -> None:
    plain = {name.partition("/")[0] for name, function in all_of_transformers().items() if is_plain_attention(function)}
    assert {"llama", "gpt2", "gpt_neox", "mistral", "qwen3", "olmo2", "phi3", "granite", "cohere2", "glm4"} <= plain
    assert not plain & set(OWN)
    assert len(plain) > 100


def test_what_is_plain_computes_what_llamas_does() -> None:
    """Every function that passes, once, on grouped heads with a mask."""
    torch.manual_seed(0)
    module: Any = nn.Module().eval()
    module.num_key_value_groups = 2
    q, k, v = torch.randn(2, 4, 5, 6), *torch.randn(2, 2, 2, 5, 6).unbind()
    mask = torch.full((5, 5), -1e9).triu(1)
    for name, function in all_of_transformers().items():
        if is_plain_attention(function):
            groups = "repeat_kv" in function.__code__.co_names
            keys, values = (k, v) if groups else (k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
            result, _ = function(module, q, keys, values, mask, scaling=0.3, dropout=0.0)
            expected, _ = llama_eager(module, q, k, v, mask, scaling=0.3, dropout=0.0)
            torch.testing.assert_close(result, expected, msg=name)


@pytest.mark.parametrize("eager", [llama_eager, mistral_eager, qwen3_eager])
def test_copies_in_imported_files(eager: Callable[..., Any]) -> None:
    assert is_plain_attention(eager)


@pytest.mark.parametrize("eager", [gemma2_eager, gpt_oss_eager, functools.partial(llama_eager, dropout=0.1), print])
def test_others(eager: Callable[..., Any]) -> None:
    assert not is_plain_attention(eager)


def test_what_a_function_calls_counts() -> None:
    """The same text over another function of its file, another default, or a variable of its own."""

    def made(text: str, **known: Any) -> Any:
        exec(text, known)
        return known["f"]

    def inside(x: int) -> Any:
        return lambda: x

    text = "def f(x, y=1): return g(x) + y"
    one, two, three = (made("def f(x): return x + 1"), made("def f(x): return x + 1"), made("def f(x): return x + 2"))
    assert same_code(one, two)
    assert not same_code(one, three)
    assert same_code(made(text, g=one), made(text, g=two))
    assert not same_code(made(text, g=one), made(text, g=three))
    assert not same_code(made(text, g=one), made(text))
    assert not same_code(made(text, g=one), made(text.replace("y=1", "y=2"), g=one))
    assert not same_code(inside(1), inside(2))
