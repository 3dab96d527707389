"""`helix_config` reaches the mixin in every order of bases, also through constructors that do not take it."""

from pathlib import Path
from typing import Any

import pytest
from support.models import QUIET, llama, sequences
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from hf_helix import HelixConfig, HelixTrainer, HelixTrainerMixin
from hf_helix.integrations.trainer.stock import put_aside, take_out


class Front(Seq2SeqTrainer, HelixTrainer):
    """The order of docs/trainer.md."""


class Below(Front):
    pass


class HandsOn(Seq2SeqTrainer, HelixTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class OnlyTwo(HelixTrainer):
    def __init__(self, model: Any, args: Any) -> None:
        super().__init__(model, args, train_dataset=sequences(4))


class Named(HelixTrainer):
    def __init__(self, model: Any, args: Any, helix_config: Any) -> None:
        super().__init__(model, args, helix_config=helix_config)


class First(HelixTrainerMixin, Trainer):
    pass


class Recorder:
    """A stand-in for the mixin, and below it any trainer."""

    def __init_subclass__(cls) -> None:
        take_out(cls, Recorder, ("helix_config",))

    def __init__(self, model: Any, helix_config: Any = None) -> None:
        self.given = model, put_aside(self, "helix_config", helix_config)


@pytest.mark.parametrize("kind", [Front, Below, HandsOn, OnlyTwo, Named, First])
def test_options_arrive(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Arrived(Exception):
        pass

    def check(self: Any, arguments: Any, given: Any) -> Any:
        raise Arrived(given)

    monkeypatch.setattr(HelixTrainerMixin, "_checked_layout", check)
    config = HelixConfig(tp_size=2)
    with pytest.raises(Arrived) as raised:
        kind(model=None, args=None, helix_config=config)
    assert raised.value.args == (config,)


def test_options_of_a_class_and_of_a_call() -> None:
    class Fixed(Recorder):
        def __init__(self, model: Any) -> None:
            super().__init__(model, helix_config="of the class")

    assert Fixed("a").given == ("a", "of the class")
    with pytest.raises(
        TypeError, match=r"Fixed\(helix_config=...\): a constructor of the class gives helix_config as well"
    ):
        Fixed("a", helix_config="of the call")  # type: ignore[call-arg]


def test_a_whole_trainer(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), **QUIET)
    given: dict[str, Any] = {"model": llama(), "args": args, "train_dataset": sequences(4)}
    trainer = Front(**given, helix_config=HelixConfig(plan="sequential"))
    assert trainer.helix_config.plan == "sequential"
    with pytest.raises(TypeError, match="helix_confg"):
        Front(**given, helix_confg=HelixConfig())
