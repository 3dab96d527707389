"""A loop of one's own around Accelerate does what it does around the unsplit model."""

import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from support.comparisons import compare_weights
from support.jobs import Stream
from support.loop_jobs import batches_of, made, reset, said, stock_window, stock_windows
from support.marks import slow
from support.models import llama, sequences
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_helix import HelixConfig, HelixPlugin
from hf_helix.integrations import steps
from hf_helix.runtime.divided import DividedParameter, full_of

# -- what the ranks run ------------------------------------------------------------------------------------------------


def refused(helix: dict[str, Any], kind: str) -> None:
    """Only prepare."""
    reset()
    plugin = HelixPlugin(HelixConfig(cache=False, **helix))
    options: dict[str, Any] = {"parallelism_config": plugin, "cpu": True}
    if kind == "another plugin":
        options["parallelism_config"] = HelixPlugin(plugin.config)
    if kind == "uneven":
        options["dataloader_config"] = DataLoaderConfiguration(even_batches=False)
    if kind == "compiled":
        options["dynamo_backend"] = "eager"
    accelerator = Accelerator(**options)
    with torch.device("meta" if kind == "states on the meta device" else "cpu"):
        model = llama(num_hidden_layers=4)
    optimizer = (torch.optim.Adagrad if "state" in kind else torch.optim.AdamW)(model.parameters())
    given: list[Any] = [model, optimizer]
    if kind == "LBFGS":
        given[1] = torch.optim.LBFGS(model.parameters())
    if kind.startswith("a step"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
    if kind == "another model":
        given[1] = torch.optim.AdamW(llama().parameters())
    if kind == "two models":
        given.append(llama())
    if kind in ("uneven", "streamed"):
        rows = sequences(8)
        given.append(DataLoader(Stream(rows) if kind == "streamed" else rows, 2, collate_fn=default_data_collator))
    plugin.prepare(accelerator, *given)


def follow(
    folder: str,
    helix: dict[str, Any] | None,
    count: int,
    accumulate: int,
    dp_size: int = 1,
    weights: str | None = None,
    kind: str = "AdamW",
    later: str = "",
    windows_of_step: int = 1,
) -> dict[str, Any]:
    """Two epochs: losses, norms and learning rates by step, evaluation of every sample, and the model saved.

    Args:
        helix: options of the plugin; None for the stock loop, in one process.
        accumulate: batches of a rank in a window.
        dp_size: ranks whose batches the stock loop trains on at once.
        weights: a folder that the model starts from, on the meta device before.
        kind: the class of the optimizer.
        later: a module whose parameters the optimizer is given once everything is prepared.
        windows_of_step: windows whose gradients add up before the optimizer steps.
    """
    plugin = None if helix is None else HelixPlugin(HelixConfig(cache=False, plan="greedy", **helix))
    all_made = made(plugin, accumulate * dp_size, count, weights, kind, later)
    accelerator, model, optimizer, loader, held_out, scheduler = all_made
    if later:
        whole = model.module if plugin else model
        optimizer.add_param_group({"params": whole.get_submodule(later).parameters(), "lr": 2e-2})
    train = model.train_window if plugin else stock_window(accelerator, model)
    evaluate = model.evaluate if plugin else lambda batch, logits: model.eval()(**batch)
    result: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for _ in range(2):
        windows = model.windows(loader) if plugin else stock_windows(loader, accelerator.gradient_accumulation_steps)
        for place, window in enumerate(windows, 1):
            result["losses"].append(float(train(window)))
            if place % windows_of_step:
                continue
            result["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            for _ in range(1 if plugin else dp_size):
                scheduler.step()
            optimizer.zero_grad()
            result["rates"].append(scheduler.get_last_lr()[0])
    samples, guesses = [], []
    for batch in held_out:
        with torch.no_grad():
            output = evaluate(batch, logits=True)
        samples.append(accelerator.gather_for_metrics(output.loss.detach().repeat(len(batch["input_ids"]))))
        guesses.append(accelerator.gather_for_metrics(output.logits))
    result |= {"eval": torch.cat(samples).tolist(), "logits": torch.cat(guesses).numpy().copy()}
    model.save_pretrained(folder)
    if plugin:
        model.engine.close()
    return result


def misuse(helix: dict[str, Any]) -> dict[str, str]:
    """What is said to those who go on as if the model were whole."""
    accelerator, model, _, loader, *_ = made(HelixPlugin(HelixConfig(cache=False, **helix)), 2, 8)
    batch = next(iter(loader))
    result = {
        "backward": said(lambda: accelerator.backward(torch.zeros(()))),
        "accumulate": said(lambda: accelerator.accumulate(model)),
        "save_state": said(lambda: accelerator.save_state("anywhere")),
        "load_state": said(lambda: accelerator.load_state("anywhere")),
        "call": said(lambda: model(**batch)),
        "module": said(lambda: model.module(**batch)),
        "no batch": said(lambda: model.train_window([])),
        "no labels": said(lambda: model.train_window([{"input_ids": batch["input_ids"]}])),
        "cut twice": said(lambda: accelerator.parallelism_config.prepare(accelerator, model.module)),
    }
    model.engine.close()
    return result


def clip_values(helix: dict[str, Any], limit: float) -> tuple[str, float, float]:
    """What is said where the model's own parameters are given; the largest gradient before its values are clipped, and
    after."""
    accelerator, model, _, loader, *_ = made(HelixPlugin(HelixConfig(cache=False, plan="sequential", **helix)), 1, 8)
    model.train_window([next(iter(loader))])
    result = [max(float(p.grad.abs().max()) for p in model.parameters())]
    words = said(lambda: accelerator.clip_grad_value_(model.module.parameters(), limit))
    result.append(max(float(p.grad.abs().max()) for p in model.parameters()))
    model.engine.close()
    return words, *result


class Failing(torch.optim.SGD):
    granularity = "element"

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no memory")


class OwnStep(torch.optim.SGD):
    """A step that may look at anything."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def stray(option: str) -> dict[str, str]:
    """What is said, where ranks share parameters or the optimizer, when optimizers step that were not prepared with the
    model. Nothing watches them once the model is gone."""
    plugin = HelixPlugin(HelixConfig(cache=False, plan="sequential", **{option: True}))
    gc.collect()
    before = len(steps._calls)
    made(plugin, 1, 8)[1].engine.close()
    gc.collect()
    assert len(steps._calls) == before
    reset()
    accelerator, whole = Accelerator(cpu=True, parallelism_config=plugin), llama()
    first = torch.optim.AdamW(whole.parameters())
    model, prepared, loader = plugin.prepare(accelerator, whole, torch.optim.SGD(whole.parameters()), batches_of(8))
    model.train_window([next(iter(loader))])
    found = {
        "made before": said(first.step),
        "made afterwards": said(torch.optim.AdamW(whole.lm_head.parameters()).step),
        "of Accelerate": said(accelerator.prepare_optimizer(torch.optim.SGD(whole.parameters())).step),
        "of matrices": said(torch.optim.Adafactor(model.parameters()).step),
        "of more": said(OwnStep(model.parameters()).step),
        "another model's": said(torch.optim.SGD(llama().parameters()).step),
        "prepared": said(prepared.step),
    }
    assert said(Failing(whole.parameters()).step) == "no memory"
    assert isinstance(whole.lm_head.weight, DividedParameter)  # whole to the script, also after a step that failed
    prepared.param_groups[0]["params"].append(whole.lm_head.weight)
    found["changed by hand"] = said(prepared.step)
    model.engine.close()
    return found


def stepped(option: str, prepared: bool) -> list[float]:
    """Losses of windows and evaluations with an optimizer that does not count the versions of what it steps, prepared
    with the model, or made of what that has returned."""
    reset()
    plugin = HelixPlugin(HelixConfig(cache=False, plan="greedy", **{option: True}))
    accelerator, model, loader = Accelerator(cpu=True, parallelism_config=plugin), llama(), batches_of(16)
    options: dict[str, Any] = {"lr": 1e-2, "fused": True}
    if prepared:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)
    else:
        model, loader = plugin.prepare(accelerator, model, loader)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses = []
    for batch in loader:
        losses += [float(model.train_window([batch])), float(model.evaluate(batch).loss)]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(model.evaluate(batch).loss))
    model.engine.close()
    return losses


def focal(model: Any, batch: Any) -> torch.Tensor:
    logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["input_ids"][:, 1:]
    taken = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    return -((1 - taken.exp()) ** 2 * taken).mean() + 1e-4 * functional.normalize(model.lm_head.weight).sum()


def follow_own_loss(helix: dict[str, Any] | None, num_batches: int = 2) -> tuple[list[float], list[torch.Tensor]]:
    """Three steps of `num_batches` batches, then an evaluation."""
    reset()
    torch.manual_seed(0)
    model: Any = llama(num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(sequences(6 * num_batches), 2, collate_fn=default_data_collator)
    figures = []
    if helix is None:
        for window in stock_windows(loader, num_batches):
            losses = [focal(model, batch) / num_batches for batch in window]
            sum(losses, start=torch.zeros(())).backward()
            figures += [sum(losses).item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
            optimizer.step()
            optimizer.zero_grad()
        figures.append(focal(model, next(iter(loader))).item())
        return figures, [each.detach() for each in model.parameters()]
    dp_size = helix.pop("dp_size", 1)
    plugin = HelixPlugin(HelixConfig(cache=False, plan="greedy", **helix))
    accelerator = Accelerator(parallelism_config=plugin, cpu=True, gradient_accumulation_steps=num_batches // dp_size)
    cut, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader, loss=focal)
    for window in cut.windows(loader):
        figures += [float(cut.train_window(window)), float(cut.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    first = next(iter(loader))
    figures.append(float(cut.evaluate(first).loss))
    assert figures[-1] == pytest.approx(float(focal(cut.module, first)), rel=1e-6)  # gradients on
    return figures, [full_of(each) for each in cut.parameters()]


def other_options_of_rank(seeds: tuple[int, ...]) -> None:
    """Every rank gives another seed."""
    reset()
    plugin = HelixPlugin(tp_size=2)
    accelerator = Accelerator(parallelism_config=plugin, cpu=True)
    plugin.prepare(accelerator, llama(), seed=seeds[torch.distributed.get_rank()])


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("helix", "count", "accumulate", "ranks"),
    [
        ({"tp_size": 2}, 13, 4, 2),  # the last window of an epoch, and its last batch, are shorter
        ({"pp_size": 2}, 13, 4, 2),
        ({"shard_parameters": True}, 12, 2, 2),
        slow({"shard_optimizer": True}, 12, 2, 2),
        slow({"pp_size": 2, "offload": "optimizer"}, 13, 4, 2),
        slow({"cp_size": 2}, 13, 4, 2),
        slow({"tp_size": 2}, 12, 2, 4),
    ],
    ids=str,
)
def test_as_the_stock_loop(
    helix: dict[str, Any], count: int, accumulate: int, ranks: int, cluster_of: Any, tmp_path: Path, stock: Any
) -> None:
    dp_size = ranks // math.prod(helix.get(f"{axis}_size", 1) for axis in ("tp", "pp", "cp"))
    wanted, folder = stock(follow, count=count, accumulate=accumulate, dp_size=dp_size)
    options = {"folder": str(tmp_path), "helix": helix, "count": count, "accumulate": accumulate}
    every = cluster_of(ranks).run(follow, **options)
    for result in every:
        assert result["rates"] == wanted["rates"]
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=1e-4)
        assert len(result["logits"]) == 5
        np.testing.assert_allclose(result["logits"], wanted["logits"], rtol=0, atol=1e-4)
        if dp_size == 1:  # a rank's own batches otherwise
            np.testing.assert_allclose(result["eval"], wanted["eval"], rtol=0, atol=1e-5)
    compare_weights(tmp_path, folder)


@pytest.mark.parametrize(
    "helix", [{"tp_size": 2}, slow({"pp_size": 2}), slow({"shard_optimizer": True, "dp_size": 2})], ids=str
)
def test_a_loss_of_ones_own(helix: dict[str, Any], cluster_of: Any) -> None:
    figures, weights = follow_own_loss(None)
    for found, trained in cluster_of(2).run(follow_own_loss, helix=helix):
        count = len(figures) - 1 if "dp_size" in helix else len(figures)  # the first batch of a rank is its own
        assert found[:count] == pytest.approx(figures[:count], rel=1e-4)
        for mine, stock in zip(trained, weights, strict=True):
            torch.testing.assert_close(mine, stock, rtol=1e-4, atol=2e-5)


OTHER_LOOPS: dict[str, dict[str, Any]] = {
    # They are cut with the parameters.
    "an optimizer that starts with states": {"kind": "Adagrad"},
    # It is given as the model has it, and trained where this rank steps it.
    "a group of parameters that comes later": {"later": "lm_head"},
    "gradients of two windows add up": {"count": 16, "windows_of_step": 2},
    # The model is on the meta device, and its optimizer was made before it had weights.
    "weights of a folder": {},
}
STATES, LATER, ADDED, FOLDER = OTHER_LOOPS
TP, PP, PARAMETERS, OPTIMIZER = {"tp_size": 2}, {"pp_size": 2}, {"shard_parameters": True}, {"shard_optimizer": True}


@pytest.mark.parametrize(
    ("name", "helix"),
    [
        *((STATES, {**TP, **PARAMETERS}), (LATER, PARAMETERS), (ADDED, PARAMETERS)),
        *(slow(STATES, helix) for helix in (PP, OPTIMIZER)),
        slow(LATER, {}),
        *(slow(FOLDER, helix) for helix in (PP, PARAMETERS)),
    ],
    ids=str,
)
def test_other_loops(name: str, helix: dict[str, Any], cluster_of: Any, tmp_path: Path, stock: Any) -> None:
    options = {"count": 12, **OTHER_LOOPS[name]}
    dp_size = 1 if helix.keys() & {"tp_size", "pp_size"} else 2
    options["accumulate"] = 4 // dp_size // options.get("windows_of_step", 1)
    wanted, _ = stock(follow, dp_size=dp_size, **options)
    if name == FOLDER:
        llama(num_hidden_layers=4).save_pretrained(tmp_path / "start")
        options["weights"] = str(tmp_path / "start")
    for result in cluster_of(2).run(follow, folder=str(tmp_path / "end"), helix=helix, **options):
        assert len(result["losses"]) == len(result["norms"]) * options.get("windows_of_step", 1) >= 4
        np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], wanted["norms"], rtol=1e-4)


def test_what_the_accelerator_would_do_wrongly(cluster_of: Any) -> None:
    for result in cluster_of(2).run(misuse, helix={"tp_size": 2}):
        for name, words in {
            "backward": "has run backward already; leave it out",
            "accumulate": "use `for window in model.windows(dataloader):`",
            "save_state": "use model.save_pretrained(folder)",
            "load_state": "use from_pretrained(folder) before prepare()",
            "call": "cannot be called directly; use model.train_window(batches)",
            "module": "cannot be called directly with gradients; use model.train_window(batches)",
            "no batch": "such as [batch]; got none",
            "no labels": "no labels",
            "cut twice": "cut by an earlier HelixTrainer or HelixPlugin.prepare",
        }.items():
            assert words in result[name], name


def test_values_of_gradients_are_clipped_where_they_are(cluster_of: Any) -> None:
    limit = 2**-10  # has no error in fp32
    for words, before, after in cluster_of(2).run(clip_values, helix={"shard_parameters": True}, limit=limit):
        assert words == ""
        assert before > limit >= after > limit / 2


@pytest.mark.parametrize("option", ["shard_parameters", "shard_optimizer"])
def test_optimizers_that_nobody_has_prepared(option: str, cluster_of: Any) -> None:
    """They step the model's parameters, however they have come to them."""
    for found in cluster_of(2).run(stray, option=option):
        assert "use one of AdamW, Adam, SGD" in found.pop("of more")
        assert set(found.values()) == {""}, found


def test_an_optimizer_of_the_parts_of_a_prepared_model(cluster_of: Any) -> None:
    """It is what it would be had it been prepared with the model: evaluation and windows have what it has stepped."""
    wanted, losses = (cluster_of(2).run(stepped, option="shard_optimizer", prepared=given) for given in (True, False))
    assert losses == wanted
    assert len(losses[0]) == 12
    assert all(before != after for before, after in zip(losses[0][1::3], losses[0][2::3], strict=True))


@pytest.mark.parametrize(
    ("helix", "kind", "words"),
    [
        ({"tp_size": 2}, "another plugin", "use Accelerator(parallelism_config=plugin"),
        ({"tp_size": 2}, "compiled", "use dynamo_backend='no'"),
        ({"tp_size": 2}, "LBFGS", "use one of AdamW, Adam, SGD"),
        ({"tp_size": 2}, "a step", "optimizer=(AdamW, ...) has taken steps on the whole model"),
        ({"tp_size": 2}, "a step after a state", "optimizer=(Adagrad, ...) has taken steps on the whole model"),
        ({"tp_size": 2}, "states on the meta device", "make the model with from_pretrained(folder)"),
        ({"tp_size": 2}, "another model", "not the model's; make it from model.parameters()"),
        ({"tp_size": 2}, "two models", "takes one model, got LlamaForCausalLM, LlamaForCausalLM"),
        ({}, "uneven", "use DataLoaderConfiguration(even_batches=True)"),
        ({}, "streamed", "use DataLoaderConfiguration(dispatch_batches=False)"),
    ],
)
def test_refusals(helix: dict[str, Any], kind: str, words: str, cluster_of: Any) -> None:
    cluster_of(2).assert_raises(refused, words, helix=helix, kind=kind)


def test_precision_and_seed() -> None:
    _, model, *_ = made(HelixPlugin(tp_size=1), 1, 4, mixed_precision="bf16")
    assert model.engine.runner.precision.autocast_dtype is torch.bfloat16
    model.engine.close()
    with pytest.raises(ValueError, match="mixed_precision='fp16': use mixed_precision='bf16'"):
        made(HelixPlugin(tp_size=1), 1, 4, mixed_precision="fp16")
    accelerator, model, *_ = made(HelixPlugin(tp_size=1), 1, 4)
    model.engine.close()
    plugin = accelerator.parallelism_config
    for options, expected in (({}, 77), ({"seed": 78}, 78)):
        whole = llama()
        torch.manual_seed(77)  # as set_seed does
        model = plugin.prepare(accelerator, whole, **options)
        assert model.engine.runner.seed == expected
        model.engine.close()


def test_a_plugin_without_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has those of the environment, or of the launcher."""
    with pytest.raises(ValueError, match=r"no helix options were given[\s\S]*HELIX_CONFIG_FILE"):
        HelixPlugin()
    (tmp_path / "helix.yaml").write_text("{tp_size: 2, pp_size: 2}")
    monkeypatch.setenv("HELIX_CONFIG_FILE", str(tmp_path / "helix.yaml"))
    assert (HelixPlugin().config.pp_size, HelixPlugin().tp_size) == (2, 4)
    assert HelixPlugin(tp_size=3).tp_size == 3


def test_ranks_with_other_options(cluster_of: Any) -> None:
    cluster_of(2).assert_raises(other_options_of_rank, "seed given", seeds=(1, 2))
