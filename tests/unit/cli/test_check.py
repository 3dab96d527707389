"""hf-helix check: what it prints without comparing, and what it says of names that are none."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from hf_helix import testing
from hf_helix.cli import main
from hf_helix.engine.proof.verdict import Proof


def rows(text: str) -> dict[str, str]:
    """The first word of every line, with the rest."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}


def test_operators_of_a_derived_class(capsys: pytest.CaptureFixture[str]):
    """Fused matrices are cut in blocks, what stands on shards sums its gradients, and values are gathered once."""
    main(["check", "Phi3ForCausalLM", "--operators"])
    result = rows(capsys.readouterr().out)
    assert result["input_layernorm.gather"] == "AllGather input_layernorm"
    assert result["self_attn.o_proj.scatter"] == "ReduceScatter self_attn.o_proj"
    assert result["model.layers.0.mlp.gate_up_proj.weight"] == "192x64, dimension 0 cut over tp, in blocks of 96, 96"
    assert result["model.layers.0.self_attn.o_proj.weight"].endswith("dimension 1 cut over tp")
    assert result["model.norm.weight"] == "64, on every rank, gradients summed over the ranks"
    assert result["layers.0,"] == "layers.1: parameters"
    main(["check", "LlamaForCausalLM", "--operators", "--tp_size", "1"])
    assert "Gather" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Gemma99ForCausalLM"], "Gemma99ForCausalLM is no class of Transformers"),
        (["GPT2Model"], "GPT2Model is no causal language model"),
        (["BertForMaskedLM"], "use BertLMHeadModel; HelixTrainer trains other heads"),
        (["T5ForConditionalGeneration"], "the stock Trainer all else"),
        (["LlamaForCausalLMM"], "(did you mean 'LlamaForCausalLM'?)"),
        (["LlamaForCausalLM", "--operators", "--pp_size", "2"], "leave --pp_size out"),
        (
            ["LlamaForCausalLM", "--config_file", "x.yaml", "--tp_size", "2"],
            "with --tp_size: the file has the sizes; give one",
        ),
        (["LlamaForCausalLM", "--config_file", "absent.yaml"], "cannot read the configuration file absent.yaml"),
    ],
)
def test_what_cannot_be_checked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_sizes_of_a_folder_that_do_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The folder's own sizes, not those of the small copy; each message names values that work."""
    small = {"num_hidden_layers": 2, "hidden_size": 96, "head_dim": 16, "vocab_size": 128, "num_key_value_heads": 3}
    for config, words, said in (
        (
            LlamaConfig(**small, num_attention_heads=6),
            ["--tp_size", "2"],
            "heads and 3 key-value heads; values that work: 1",
        ),
        (
            LlamaConfig(**small, num_attention_heads=6),
            ["--pp_size", "4"],
            "2 layers and pp_size=4 needs at least 8; the",
        ),
        (
            MixtralConfig(**small, num_attention_heads=6, num_local_experts=6),
            ["--ep_size", "4"],
            "values that work for ep_size: 1, 2, 3, 6",
        ),
    ):
        config.save_pretrained(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main(["check", str(tmp_path), *words])
        assert ended.value.code == 1
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["it is recurrent"] * 4, ["Some at every layout: refused: it is recurrent"]),
        (
            ["it is recurrent", "it is recurrent", "it has one head"],
            ["Some at layout 0; layout 1: refused: it is recurrent", "Some at layout 2: refused: it has one head"],
        ),
    ],
)
def test_a_refusal_is_said_once(
    reasons: list[str], said: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    result = [Proof("Some", f"layout {n}", refusal=reason) for n, reason in enumerate(reasons)]
    monkeypatch.setattr(testing, "prove_layouts", lambda *given: iter(result))
    with pytest.raises(SystemExit):
        main(["check", "LlamaForCausalLM"])
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize(
    ("text", "checked"),
    [
        ("tp_size: 4\n", [(4, 1)]),
        (
            "layouts: {8: {tp_size: 4}, 4: {tp_size: 2, pp_size: 2}, 2: {tp_size: 2}, 6: {tp_size: 2}}",
            [(4, 1), (2, 1), (2, 2)],
        ),
    ],
)
def test_the_layouts_of_a_file_are_checked(
    text: str, checked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given: list[dict[str, int]] = []

    def prove(subject: object, layouts: list[dict[str, int]], *_: object) -> object:
        given.extend(layouts)
        return iter([Proof("Some", "layout", refusal="it is not compared here")])

    monkeypatch.setattr(testing, "prove_layouts", prove)
    (tmp_path / "helix.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["check", "LlamaForCausalLM", "--config_file", str(tmp_path / "helix.yaml")])
    assert [(each["tp_size"], each["pp_size"]) for each in given] == checked
