"""A cut decoder that is called: losses and gradients of the unsplit model, every possible pair of passes overlapped."""

import copy
from typing import Any

import pytest
import torch
from support.marks import slow
from support.models import tiny
from torch.nn import functional

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.engine.cut.build import RunOptions
from hf_helix.engine.engine import Engine
from hf_helix.models.direct_use import Instead
from hf_helix.models.graph.context import LossTweaks
from hf_helix.runtime.divided import full_of


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    """Of all positions, padding included."""
    logits = model(**batch).logits.float()
    likelihood = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    return likelihood + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def twice(model: Any, batch: dict[str, Any]) -> Any:
    """Two calls in one loss."""
    first, second = (model(input_ids=ids).logits.float() for ids in (batch["input_ids"], batch["input_ids"].flip(1)))
    return functional.kl_div(first.log_softmax(-1), second.log_softmax(-1), log_target=True, reduction="batchmean")


def distilled(model: Any, batch: dict[str, Any]) -> Any:
    """Of every hidden state, the embedding and the last one included, and not of the logits."""
    states = model(**batch, output_hidden_states=True, logits_to_keep=1).hidden_states
    assert len(states) == 6
    return sum(
        (place + 1) * functional.cosine_similarity(a, b, -1).mean() for place, (a, b) in enumerate(pairs(states))
    )


def pairs(states: Any) -> Any:
    return zip(states, [*states[1:], states[0].roll(1, 1)], strict=True)


def routed(model: Any, batch: dict[str, Any]) -> Any:
    """The model's own loss with that of its routers, a z-loss of their logits, and a call without either."""
    plain = model(**batch).logits.float().logsumexp(-1).pow(2).mean()
    outputs = model(**batch, labels=batch["input_ids"], output_router_logits=True)
    assert outputs.aux_loss is not None
    squares = [each.float().logsumexp(-1).pow(2).mean() for each in outputs.router_logits[::2]]
    return outputs.loss + 1e-2 * plain + 0.1 * sum(squares)


def states_and_routers(model: Any, batch: dict[str, Any]) -> Any:
    outputs = model(**batch, output_router_logits=True, output_hidden_states=True)
    return outputs.aux_loss + outputs.hidden_states[2].float().pow(2).mean()


def in_two_modes(model: Any, batch: dict[str, Any]) -> Any:
    """Two calls in one loss, where the first drops all that layers add, and the second drops nothing."""
    dropped, full = (model.train(mode)(**batch).logits.float() for mode in (True, False))
    return functional.kl_div(dropped.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="batchmean")


RULES = {
    "modes": in_two_modes,
    "loss": loss_of,
    "twice": twice,
    "distilled": distilled,
    "routed": routed,
    "both": states_and_routers,
}


def train(helix: dict[str, Any], rule: str = "loss", padded: bool = False, **changes: Any) -> dict[str, Any]:
    whole = tiny(**{"num_hidden_layers": 5, **changes}).train()
    model, config = copy.deepcopy(whole), HelixConfig(plan="greedy", cache=False, **helix)
    mesh = HelixPlugin(config).build_mesh(torch.device("cpu"))
    options = RunOptions(num_microbatches=3, loss_tweaks=LossTweaks(ends_at_decoder=True))
    engine = Engine(model, config, mesh, options, Instead("", ""))
    torch.manual_seed(3)
    losses = []
    for number in range(3):
        ids = torch.randint(1, 131, (4, 12 + 4 * (number % 2)))
        batch = {"input_ids": ids}
        if padded:
            mask = torch.ones_like(ids)
            mask[1, -5:] = 0
            batch["attention_mask"] = mask
        assert engine.session.called_decoder is not None
        with engine.session.called_decoder.training(step=0):
            pair = [RULES[rule](each, batch) for each in (whole, model)]
            for loss in pair:
                loss.backward()
        losses.append([loss.item() for loss in pair])
    engine.session.finish_window()
    named = zip(model.named_parameters(), whole.parameters(), strict=True)
    errors = {
        name: float((full_of(mine.grad) - theirs.grad).norm() / theirs.grad.norm())
        for (name, mine), theirs in named
        if theirs.grad is not None
    }
    return {"losses": losses, "errors": errors, "fused": engine.session.called_decoder.deferred_backward.num_fused}


TIED = {"tie_word_embeddings": True}
MIXTURE, SPARSE, PHIMOE = {"family": "mixtral"}, {"family": "qwen3_moe"}, {"family": "phimoe"}


TP, PP, CP, EP = ({f"{axis}_size": 2} for axis in ("tp", "pp", "cp", "ep"))
DROPPING = {"family": "gpt2", "resid_pdrop": 1.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}


@pytest.mark.parametrize(
    ("ranks", "helix", "options"),
    [
        (2, TP, TIED),
        (2, PP, {"padded": True}),
        (2, TP, {"rule": "modes", **DROPPING}),
        (2, PP, {"rule": "routed", "num_hidden_layers": 4, **PHIMOE}),
        slow(2, PP, {"rule": "twice"}),
        slow(2, CP, {"padded": True, **TIED}),
        slow(2, {**PP, "offload": "optimizer"}, {}),
        slow(2, {"shard_parameters": True}, TIED),
        slow(2, {"shard_parameters": True, "reduce_gradients": "microbatch"}, {}),
        slow(2, TP, {"lora": {}}),
        slow(4, {**TP, **PP, "schedule": "1f1b"}, {}),
        slow(4, {**PP, "shard_optimizer": True}, TIED),
        slow(4, {**TP, **PP}, {"rule": "distilled", "padded": True}),
        slow(2, EP, {"rule": "routed", **MIXTURE}),
        slow(2, TP, {"rule": "both", "padded": True, **SPARSE}),
        slow(2, {**PP, "recompute": "full"}, {"rule": "both", **PHIMOE}),
        slow(4, {**TP, **CP}, {"rule": "both", "padded": True, **MIXTURE}),
    ],
    ids=str,
)
def test_equals_the_unsplit_model(ranks: int, helix: dict[str, Any], options: dict[str, Any], cluster_of: Any) -> None:
    for result in cluster_of(ranks).run(train, helix=helix, **options):
        for wanted, found in result["losses"]:
            assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6)
        assert max(result["errors"].values()) < 2e-5, result["errors"]
        calls = {"twice": 2, "routed": 2}.get(options.get("rule", ""), 1)
        overlaps = options.get("rule") != "modes" and helix.get("schedule") != "1f1b"
        assert result["fused"] == (3 * calls - calls if overlaps else 0)


def backward_again(at_once: bool) -> Any:
    """Two losses of a call, with another call between them unless `at_once`; the gradient of a weight."""
    model = tiny(num_hidden_layers=2).train()
    config = HelixConfig(plan="greedy", tp_size=2)
    mesh = HelixPlugin(config).build_mesh(torch.device("cpu"))
    engine = Engine(model, config, mesh, RunOptions(loss_tweaks=LossTweaks(ends_at_decoder=True)), Instead("", ""))
    assert engine.session.called_decoder is not None
    with engine.session.called_decoder.training(step=0):
        logits = model(input_ids=torch.arange(1, 25).view(2, 12)).logits
        logits.mean().backward(retain_graph=True)
        if not at_once:
            model(input_ids=torch.arange(1, 25).view(2, 12)).logits.mean().backward()
        logits.pow(2).mean().backward()
    engine.session.finish_window()
    return full_of(model.model.layers[0].mlp.up_proj.weight.grad).clone()


def test_two_backward_passes_of_a_call(cluster_of: Any) -> None:
    cluster_of(2).assert_raises(backward_again, "a second .backward()", raises="RuntimeError", at_once=False)
    ids = torch.arange(1, 25).view(2, 12)
    whole = tiny(num_hidden_layers=2).train()
    logits = whole(input_ids=ids).logits
    (logits.mean() + logits.pow(2).mean()).backward()
    for found in cluster_of(2).run(backward_again, at_once=True):
        torch.testing.assert_close(found, whole.model.layers[0].mlp.up_proj.weight.grad, rtol=1e-4, atol=1e-7)
