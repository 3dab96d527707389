"""A cut model that is called without gradients, and generates, is equal to the uncut model on every rank."""

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.jobs import make_trainer
from support.marks import slow
from support.models import VOCABULARY, tiny
from transformers import Trainer, TrainerCallback

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.engine.cut.build import RunOptions
from hf_helix.engine.engine import Engine
from hf_helix.models.direct_use import Instead
from hf_helix.models.graph.context import LossTweaks
from hf_helix.runtime.divided import full_of

FIVE = {"num_hidden_layers": 5}
GENERATIONS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "without cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
}
SHORT = [FIVE, {**FIVE, "tie_word_embeddings": True, "lora": {}}]
FAMILIES = [
    {**FIVE, "family": name} for name in ("phimoe", "mixtral", "gpt2", "gpt_neox", "support.derived_models:phi3")
]
BIASED = [*SHORT, {**FIVE, "family": "gpt2"}]  # with biases, of linears that are cut along their inputs, too
TP, PP, EP = {"tp_size": 2}, {"pp_size": 2}, {"ep_size": 2}


@pytest.mark.parametrize(
    ("ranks", "helix", "models"),
    [
        (2, TP, [{"num_hidden_layers": 2}]),
        slow(2, PP, SHORT),
        slow(2, TP, FAMILIES),
        slow(2, EP, FAMILIES[:2]),
        slow(4, {**TP, **PP}, BIASED),
        slow(4, {**TP, "shard_parameters": True}, BIASED),
        slow(4, {**TP, "cp_size": 2}, BIASED),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_calls_and_generation(
    ranks: int, helix: dict[str, Any], models: list[dict[str, Any]], cluster_of: Any, tmp_path: Any
) -> None:
    for cases in cluster_of(ranks).run(compared, folder=str(tmp_path), helix=helix, models=models):
        for case in cases:
            wrong = [name for name, is_equal in case["equal"].items() if not is_equal]
            assert not wrong, (case["model"], wrong)
            assert max(case["errors"].values()) <= 1e-5, case


def test_generation_in_a_callback(cluster_of: Any, tmp_path: Any) -> None:
    expected, quiet = trained(str(tmp_path / "stock"), None)
    for found, silent in cluster_of(2).run(trained, folder=str(tmp_path), helix=TP):
        assert found["tokens"] == expected["tokens"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["losses"] == silent["losses"]
    assert expected["losses"] == quiet["losses"]


@pytest.mark.parametrize("own_loss", [False, True])
def test_arguments_and_copies(own_loss: bool, cluster_of: Any) -> None:
    for errors, said in cluster_of(2).run(called, helix={"tp_size": 2}, own_loss=own_loss):
        assert max(errors.values()) <= 1e-5, errors
        assert len(said) == 2
        assert all("this is a copy of the model that hf_helix trains, and cannot be called" in text for text in said)


# In the processes of a cluster


def compared(folder: str, helix: dict[str, Any], models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each cut model gives, compared with the uncut one."""
    return [compared_model(folder, helix, model) for model in models]


def compared_model(folder: str, helix: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    whole = tiny(**model).eval()
    trainer = make_trainer(folder, helix, model)
    cut = trainer.model.eval()
    mesh, rank = trainer.helix.mesh, torch.distributed.get_rank()
    replica = 0 if mesh.dp_group is None else torch.distributed.get_rank(mesh.dp_group)
    first = rank if mesh.batch_group is None else torch.distributed.get_global_rank(mesh.batch_group, 0)
    length = 7 + replica  # ranks with different batches may differ in lengths
    ids = torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(replica))
    given = {"input_ids": ids, "attention_mask": (torch.arange(length) >= torch.tensor([[2], [0]])).long()}
    equal, errors = {}, {}
    for name, options in GENERATIONS.items():
        options = {**given, "pad_token_id": 0, "max_new_tokens": 5 + replica, **options}
        torch.manual_seed(11 + first)
        expected = whole.generate(**options)
        torch.manual_seed(11 + rank)  # as ranks that share a batch may have drawn different numbers
        equal[name] = torch.equal(cut.generate(**options), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected = whole(**given, labels=ids, output_hidden_states=True)
            found = cut(**given, labels=ids, output_hidden_states=True)
        pairs = {"loss": (found.loss, expected.loss), "logits": (found.logits, expected.logits)}
        states = zip(found.hidden_states, expected.hidden_states, strict=True)
        pairs |= {f"hidden {place}": pair for place, pair in enumerate(states)}
        errors |= {f"{mode.__name__} {name}": (a - b).abs().max().item() for name, (a, b) in pairs.items()}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        low = (cut(**given).logits - whole(**given).logits).abs().max().item()
    equal["autocast"] = low <= 2e-2
    with pytest.raises(RuntimeError, match=r"cannot be called .*with gradients"):
        cut(**given)
    trainer.helix.close()
    return {"model": model, "equal": equal, "errors": errors}


class Generates(TrainerCallback):
    """Generates after every step."""

    def __init__(self) -> None:
        self.tokens: list[list[list[int]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        ids = torch.arange(1, 6).view(1, 5)
        was_training = model.training
        found = model.eval().generate(input_ids=ids, max_new_tokens=3, pad_token_id=0)
        model.train(was_training)
        self.tokens.append(found.tolist())


def trained(folder: str, helix: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run that generates in a callback, and after training; and one that does not."""

    def run(*callbacks: Any) -> Trainer:
        training = {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
        trainer = make_trainer(folder, helix, dict(FIVE), training=training, callbacks=list(callbacks))
        trainer.train()
        return trainer

    def outcome(trainer: Trainer, tokens: Any) -> dict[str, Any]:
        return {"tokens": tokens, "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row]}

    generates = Generates()
    loud = run(generates)
    generates.on_step_end(None, None, None, model=loud.model)
    return outcome(loud, copy.deepcopy(generates.tokens)), outcome(run(), [])


def called(helix: dict[str, int], own_loss: bool) -> tuple[dict[str, float], list[str]]:
    """The errors of calls with unusual arguments, and what calls of a copy say. A window is open with a loss of one's
    own, whose gradients are compared, too."""
    whole = tiny(**FIVE)
    cut, config = copy.deepcopy(whole), HelixConfig(plan="greedy", **helix)
    options = RunOptions(num_microbatches=1, loss_tweaks=LossTweaks(ends_at_decoder=own_loss))
    engine = Engine(cut, config, HelixPlugin(config).build_mesh(torch.device("cpu")), options, Instead("", ""))
    ids = torch.arange(1, 17).view(2, 8)
    errors = {}
    with engine.session.called_decoder.training(step=0) if engine.session.called_decoder else contextlib.nullcontext():
        models = (whole, cut) if own_loss else ()
        losses = [model(input_ids=ids).logits.float().logsumexp(-1).mean() for model in models]
    if own_loss:
        for name in ("output_attentions", "output_router_logits"):
            with pytest.raises(ValueError, match=rf"with gradients and {name}=True: a call takes .*leave it out"):
                cut(input_ids=ids, **{name: True})
    with torch.no_grad():
        caches = [model(input_ids=ids[:, :6], use_cache=True).past_key_values for model in (whole, cut)]
        calls: dict[str, list[dict[str, Any]]] = {
            "cache": [{"input_ids": ids[:, 6:], "past_key_values": cache} for cache in caches],
            "embeddings": [{"inputs_embeds": torch.linspace(-1, 1, 320).view(2, 5, 32)}] * 2,
        }
        for name, (of_whole, of_cut) in calls.items():
            errors[name] = (whole(**of_whole).logits - cut(**of_cut).logits).abs().max().item()
        copied = copy.deepcopy(cut)
        said = []
        for call in (copied, copied.generate):
            with pytest.raises(RuntimeError) as refused:
                call(input_ids=ids)
            said.append(str(refused.value))
    for loss in losses:
        loss.backward()
    if losses:
        engine.session.finish_window()
        for (name, parameter), trained in zip(whole.named_parameters(), cut.parameters(), strict=True):
            errors[name] = (full_of(trained.grad) - parameter.grad).abs().max().item()
        outside = cut(input_ids=ids).logits.float().mean()
        with pytest.raises(RuntimeError, match="outside of a training step"):
            outside.backward()
    with torch.no_grad():
        for parameter in cut.parameters():
            parameter.mul_(0.5)
        cut.load_state_dict(copied.state_dict())
        errors["restored"] = (cut(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max().item()
    engine.close()
    return errors, said
