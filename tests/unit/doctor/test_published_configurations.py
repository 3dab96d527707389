"""Published configurations, at their full sizes on the meta device: every question of `check`, `simulate` and `doctor`
about a model has an answer or a refusal in one line, and the small model that is proven has all its parts."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.marks import slow

from hf_helix.config import HelixConfig
from hf_helix.doctor.case import Case
from hf_helix.doctor.counting import check_cut, kinds_of
from hf_helix.doctor.simulated import SimulatedModel
from hf_helix.engine.proof.prove import Subject
from hf_helix.engine.synthetic import model_on_meta
from hf_helix.models.stock.causal_lm import read_config
from hf_helix.models.stock.census import read_census
from hf_helix.planning.timing.cluster import load_cluster
from hf_helix.planning.timing.sizes import Sizes

TABLE = Path(__file__).with_name("published.jsonl")
PUBLISHED: dict[str, dict[str, Any]] = {
    values.pop("name"): values for values in map(json.loads, TABLE.read_text().splitlines())
}
LAYOUTS = ({"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}, {"ep_size": 2}, {"tp_size": 8})
SIZES = (Sizes(1, 1, 1, 8, 1), Sizes(2, 1, 1, 4, 1), Sizes(1, 2, 1, 4, 1), Sizes(1, 1, 2, 4, 1), Sizes(1, 1, 1, 8, 2))

FAST = ("openai-community/gpt2", "facebook/opt-350m")
"""Dropout, and narrow embeddings."""


EXCUSED = ("kimi_k2", "the doctor counts without values", "draws random numbers in training")
"""Of refusals of proven classes: Transformers has no class, a block's work depends on values, and a published
option draws noise, as `moe_jitter_eps` of DBRX."""


def test_there_are_configurations_of_many_classes() -> None:
    assert len({values["model_type"] for values in PUBLISHED.values()}) >= 40


def answers(model: Any) -> Iterator[str]:
    """Asks all questions; yields the refusals."""
    kinds = kinds_of(model)
    for layout in LAYOUTS:
        try:
            check_cut(model, kinds, HelixConfig(**layout))
        except ValueError as error:
            yield str(error)
    simulated = SimulatedModel(model, load_cluster("h100x8"))
    for sizes in SIZES:
        try:
            assert simulated.amounts(Case.of(sizes, batch=1, microbatches=4, length=2048)).operators
        except ValueError as error:
            yield str(error)


@pytest.mark.parametrize("name", [slow(name, when=name not in FAST) for name in PUBLISHED])
def test_every_question_has_an_answer_or_a_refusal(name: str, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    refused, whole = [], ""
    try:
        model = model_on_meta(read_config(tmp_path), torch.bfloat16)
        refused += answers(model)
        subject = Subject(model.config, type(model))
        assert not subject.uncovered(subject.build())
    except ValueError as error:
        whole = str(error)
    is_proven = PUBLISHED[name]["architectures"][0] in read_census().proven_on("tp2", "pp2")
    assert not whole or not is_proven or any(text in whole for text in EXCUSED)
    refused += [whole] * bool(whole)
    assert all("\n" not in text and len(text) > 20 for text in refused)
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    assert "custom code" not in said.out + said.err


def test_a_folder_with_code_of_its_own_is_refused_with_the_model_type_that_serves(tmp_path: Path) -> None:
    config = copy.deepcopy(PUBLISHED["moonshotai/Kimi-K2-Instruct"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no class for model_type 'kimi_k2'.*\"model_type\": \"deepseek_v3\""):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    assert type(read_config(tmp_path)).__name__ == "DeepseekV3Config"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "architectures": ["MyModel"]}))
    with pytest.raises(ValueError, match=r"check_family\(model\)"):
        read_config(tmp_path)
