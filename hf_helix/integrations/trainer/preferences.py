"""TRL's DPO within the plan: the loss of its own code, from log-probabilities of the cut model's head.

In:   a `DPOTrainer` under the mixin, whose loss nobody overrides; the batches of a window.
Out:  the `TokenLoss` of the cut model; batches with the log-probabilities of the reference; TRL's figures for the log.
Must hold: every loss and figure is computed by TRL's own code. Nothing is logged or gathered within a window, which may
be one that is only measured. A loss that the plan cannot compute is called. TRL is not imported.

    before a window   compute_ref_log_probs(reference, batch)
    within it         compute_loss(log-probabilities, batch) up to its first figure for the log
    after it          compute_loss(log-probabilities, batch) once more, without gradients, for the figures
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_helix.engine.calls import together
from hf_helix.engine.cut.microbatches import LossScale
from hf_helix.integrations.accelerate.accelerator import RowsTogether, gather_samples
from hf_helix.integrations.trainer.stock import StockTrainer
from hf_helix.integrations.trainer.trl import name_of
from hf_helix.models.derived.model_code import has_head_beside, has_stock_loss
from hf_helix.models.graph.balance import balance_of
from hf_helix.models.graph.context import TokenLoss
from hf_helix.models.graph.token_loss import token_figures
from hf_helix.models.registry import REGISTERED
from hf_helix.models.stock.causal_lm import has_causal_head, has_towers
from hf_helix.models.stock.peft import base_of
from hf_helix.operators.vocabulary.log_probs import LogProbs
from hf_helix.operators.vocabulary.loss import IGNORED
from hf_helix.runtime.distributed.mesh import Mesh

DPO_TRAINER = "trl.trainer.dpo_trainer.DPOTrainer"
_LOSS = "_compute_loss"
_KNOWN = "hf_helix.", "transformers.", "trl.trainer.base_trainer"

_HOOKS = (
    *("compute_loss", _LOSS, "compute_ref_log_probs", "training_step", "prediction_step", "_wrap_model"),
    *("compute_loss_context_manager", "autocast_smart_context_manager", "_prepare_context_parallel_inputs"),
)
"""Methods that a step of TRL's trainer runs, and that run at other times, or not at all, within a plan."""

_LABELS = "labels"


def planned_dpo(trainer: Any, model: Any) -> "StockDPOTrainer | None":
    """Returns the description of a trainer whose loss is computed within the plan; None for any other.

    Args:
        trainer: before its model is cut.
        model: before the cut.
    """
    if not _is_stock_dpo(type(trainer)) or trainer._loss_function is not None:
        return None
    args, base = trainer.args, base_of(model)
    if getattr(trainer, "_is_vision_dataset", True) or has_towers(base) or not has_causal_head(base):
        return None
    is_declared = type(base).__name__ in REGISTERED
    if not has_stock_loss(base) or (not is_declared and has_head_beside(base)):
        return None
    # The reference of an adapted model is evaluated without the additions of a training step.
    if args.activation_offloading or not args.disable_dropout or args.neftune_noise_alpha is not None:
        return None
    found = StockDPOTrainer(args, model)
    return found if found.balances_as_built(base, is_declared) else None


def _is_stock_dpo(kind: Any) -> bool:
    """Returns whether a class has the loss of TRL's DPOTrainer, as known here, and every class that overrides a
    step of it, also one behind the mixin, is a known one."""
    found = next((base for base in kind.__mro__ if name_of(base) == DPO_TRAINER), None)
    owners = [base for base in kind.__mro__ if any(hook in vars(base) for hook in _HOOKS)]
    known = (base is found or base.__module__.startswith(_KNOWN) for base in owners)
    if found is None or not all(known) or _LOSS not in vars(found):
        return False
    code = vars(found)[_LOSS].__code__
    return "loss" in code.co_varnames and "entropy" in code.co_names


class StockDPOTrainer(StockTrainer):
    """TRL's `DPOTrainer`, whose loss is one of log-probabilities.

    Args:
        args: the training arguments.
        model: before the cut.
    """

    def __init__(self, args: Any, model: Any) -> None:
        config, asked = model.config.get_text_config(), args.router_aux_loss_coef
        self._coefficient = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
        self._balances = hasattr(config, "output_router_logits") and self._coefficient != 0.0
        self._outputs = ("entropy", "mean_logits", "is_top1", *(["log_sum_sq_probs"] if args.use_weighting else []))

    def balances_as_built(self, base: Any, is_declared: bool) -> bool:
        """Returns whether the loss of routers, if TRL adds one, is the one that is built."""
        if is_declared:
            return bool(getattr(base.config, "output_router_logits", False)) == self._balances
        try:
            with self.settling(base):
                return (balance_of(base) is not None) == self._balances
        except ValueError:
            return False

    @contextlib.contextmanager
    def settling(self, model: Any) -> Iterator[None]:
        """Returns the context in which a model is cut: its configuration asks for a loss of routers if TRL does."""
        config = base_of(model).config
        known = {"output_router_logits": self._balances} if hasattr(config, "output_router_logits") else {}
        with _attributes(config, **known):
            yield

    def token_loss(self, trainer: Any) -> TokenLoss:
        """Returns the loss within the plan."""

        def loss(found: LogProbs, batch: Mapping[str, Tensor]) -> Tensor:
            return _loss_of(trainer, found, _without_labels(batch))

        return TokenLoss(loss, self._outputs, self._coefficient)

    def batch_factor(self, num_parts: int, dp_size: float) -> float:
        """Returns the factor of the loss of a micro-batch: TRL averages over micro-batches and ranks."""
        return 1 / num_parts

    def prepare(self, trainer: Any, inputs: Any) -> Any:
        """Returns a batch on the device with labels, and with the log-probabilities of the reference. Collective."""
        batch = trainer._prepare_inputs(inputs)
        if not trainer.precompute_ref_logps:
            reference = trainer.ref_model or self.evaluated(trainer)
            with together():
                chosen, rejected = trainer.compute_ref_log_probs(reference, batch)
            batch = {**batch, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return {**batch, _LABELS: batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)}

    def take_losses(self, trainer: Any, batches: Sequence[Any], found: Sequence[Tensor]) -> Tensor:
        """Returns the losses, and makes TRL's code keep its figures. Collective over the data-parallel ranks."""
        mesh, stock = trainer.helix.mesh, trainer.accelerator
        with torch.no_grad(), trainer.compute_loss_context_manager(), _attributes(trainer, precompute_ref_logps=True):
            if mesh.dp_size == 1:
                _keep_figures(trainer, batches, found)
            else:
                rows = RowsTogether(mesh)
                with _attributes(trainer, accelerator=_OneMessage(stock, mesh, rows)):
                    nowhere = {mode: defaultdict[str, list[float]](list) for mode in trainer._metrics}
                    with _attributes(trainer, _metrics=nowhere, _total_train_tokens=0):
                        _keep_figures(trainer, batches, found)
                    rows.exchange()
                    _keep_figures(trainer, batches, found)
        return torch.stack([values[0] for values in found])

    def evaluated(self, trainer: Any) -> Callable[..., Any]:
        """Returns what stands for the cut model in TRL's code outside of windows: runs forward. Collective."""

        def model(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if not fused_lm_head:
                return trainer.model(*args, **kwargs)
            batch = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
            session, trains = trainer.helix.session, trainer.model.training
            values, _ = session.evaluate(batch, LossScale(None), trainer.state.global_step, is_compared=True)
            trainer.model.train(trains)
            return _outputs(values, batch["input_ids"])

        return model


class _OneMessage:
    """An `Accelerator` that gathers a window's figures in one message; everything else is the Accelerator's own."""

    def __init__(self, stock: Any, mesh: Mesh, rows: RowsTogether) -> None:
        self._stock, self._mesh, self._rows = stock, mesh, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def gather(self, value: Tensor) -> Tensor:
        return self._rows.gather(value)

    def gather_for_metrics(self, value: Any) -> Any:
        return gather_samples(value, self._mesh, self._stock.gradient_state, gather=self._rows.gather)


def _keep_figures(trainer: Any, batches: Sequence[Any], found: Sequence[Tensor]) -> None:
    """Runs TRL's code for the figures of a window."""
    for batch, values in zip(batches, found, strict=True):
        outputs = _outputs(values, batch["input_ids"])
        trainer.compute_loss(lambda outputs=outputs, **_: outputs, _without_labels(batch))


def _outputs(values: Tensor, ids: Tensor) -> Any:
    """Returns what TRL's fused head returns, from the output of the cut model for a micro-batch.

    Args:
        values: [1 + figures].
        ids: [rows, sequence].
    """
    found, rest = token_figures(values, *ids.shape)
    named = zip(LogProbs._fields, found, strict=True)
    return SimpleNamespace(**dict(named), aux_loss=rest[0] if len(rest) else None)


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch as TRL's code takes it, which makes the labels itself."""
    return {name: value for name, value in batch.items() if name != _LABELS}


# -- the loss before its figures -----------------------------------------------------------------------------------


class _FiguresBegin(Exception):
    """TRL's code has computed a loss, and goes on with figures for the log, which wait for the device and for ranks."""


class _BeforeFigures:
    """The output of the model for a loss; the entropy is the first thing that TRL's code reads after it."""

    def __init__(self, found: LogProbs) -> None:
        self.log_probs, self.log_sum_sq_probs = found.log_probs, found.log_sum_sq_probs

    @property
    def entropy(self) -> Tensor:
        raise _FiguresBegin


def _loss_of(trainer: Any, found: LogProbs, batch: Mapping[str, Any]) -> Tensor:
    """Returns the loss of TRL's code without the loss of routers.

    That code computes loss and figures in one function. It is left at the first figure, and the loss is read from its
    local variables.
    """
    outputs = _BeforeFigures(found)
    try:
        with _attributes(trainer, precompute_ref_logps=True, aux_loss_enabled=False):
            trainer.compute_loss(lambda **_: outputs, batch)
    except _FiguresBegin as reached:
        return _local(reached, getattr(type(trainer), _LOSS).__code__)
    raise AssertionError("DPOTrainer._compute_loss reads no entropy")


def _local(error: BaseException, code: CodeType) -> Tensor:
    """Returns the variable `loss` of a function that an error has left. No frame of the error stays in a variable: it
    would keep the micro-batch alive until a garbage collection."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    assert trace is not None
    loss: Tensor = trace.tb_frame.f_locals["loss"]
    return loss


@contextlib.contextmanager
def _attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Returns a context in which attributes of an object have other values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
