"""TRL's DPO and KTO within the plan: the loss of their own code, from log-probabilities of the cut model's head.

In:   a `DPOTrainer` or `KTOTrainer` under the mixin, whose loss nobody overrides; the batches of a window.
Out:  the `TokenLoss` of the cut model; batches with the log-probabilities of the reference; TRL's figures for the log.
Must hold: every loss and figure is computed by TRL's own code. Nothing is logged or gathered within a window, which may
be one that is only measured. A loss that the plan cannot compute is called. TRL is not imported.

    before a window   compute_ref_log_probs(reference, batch); of KTO also _compute_kl_logps(model, batch)
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
from hf_helix.integrations.trainer.trl import attributes, name_of
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

_LOSS = "_compute_loss"
_KL = "_compute_kl_logps"
_KNOWN = "hf_helix.", "transformers.", "trl.trainer.base_trainer"

_HOOKS = (
    *("compute_loss", _LOSS, _KL, "compute_ref_log_probs", "training_step", "prediction_step", "_wrap_model"),
    *("compute_loss_context_manager", "autocast_smart_context_manager", "_prepare_context_parallel_inputs"),
)
"""Methods that a step of TRL's trainers runs, and that run at other times, or not at all, within a plan."""

_LABELS = "labels"


def planned_preferences(trainer: Any, model: Any) -> "StockPreferenceTrainer | None":
    """Returns the description of a trainer whose loss is computed within the plan; None for any other.

    Args:
        trainer: before its model is cut.
        model: before the cut.
    """
    kind = next((each for each in (StockDPOTrainer, StockKTOTrainer) if each.describes(type(trainer))), None)
    if kind is None or trainer._loss_function is not None:
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
    found = kind(args, model)
    return found if found.balances_as_built(base, is_declared) else None


class StockPreferenceTrainer(StockTrainer):
    """A trainer of TRL with a reference, whose loss is one of log-probabilities.

    Args:
        args: the training arguments.
        model: before the cut.

    Attributes:
        trl_class: the name of TRL's class.
        local: the variable of its loss before the first figure.
        reads: names that its loss, as known here, reads.
        reference: the keys of a batch for what `compute_ref_log_probs` returns.
        outputs: the figures that its code reads.
        gathers_alike: whether its code gathers the same figures in every batch.
    """

    trl_class: str
    local: str
    reads: set[str]
    reference: tuple[str, str]
    outputs: tuple[str, ...]
    gathers_alike = True

    def __init__(self, args: Any, model: Any) -> None:
        config, asked = model.config.get_text_config(), args.router_aux_loss_coef
        self._coefficient = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
        self._balances = hasattr(config, "output_router_logits") and self._coefficient != 0.0

    @classmethod
    def describes(cls, kind: Any) -> bool:
        """Returns whether a class has the loss of TRL's class, as known here, and every class that overrides a step of
        it, also one behind the mixin, is a known one."""
        found = next((base for base in kind.__mro__ if name_of(base) == cls.trl_class), None)
        owners = [base for base in kind.__mro__ if any(hook in vars(base) for hook in _HOOKS)]
        known = (base is found or base.__module__.startswith(_KNOWN) for base in owners)
        if found is None or not all(known) or _LOSS not in vars(found):
            return False
        code = vars(found)[_LOSS].__code__
        return cls.local in code.co_varnames and cls.reads <= {*code.co_names}

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
        with attributes(config, **known):
            yield

    def token_loss(self, trainer: Any) -> TokenLoss:
        """Returns the loss within the plan."""

        def loss(found: LogProbs, batch: Mapping[str, Tensor]) -> Tensor:
            return self._loss_of(trainer, found, _without_labels(batch))

        return TokenLoss(loss, self.outputs, self._coefficient)

    def _loss_of(self, trainer: Any, found: LogProbs, batch: Mapping[str, Any]) -> Tensor:
        """Returns the loss of TRL's code without the loss of routers.

        That code computes loss and figures in one function. It is left at the first figure, and the loss is made of
        its local variable.
        """
        outputs, known = _BeforeFigures(found), {**self.known(), **self.gathered(trainer, batch)}
        try:
            with attributes(trainer, **known, aux_loss_enabled=False, _metrics=_NoFigures()):
                trainer.compute_loss(lambda **_: outputs, batch)
        except _FiguresBegin as reached:
            return self.mean(_local(reached, getattr(type(trainer), _LOSS).__code__, self.local))
        raise AssertionError(f"{self.trl_class} reads no figures")

    def known(self) -> dict[str, Any]:
        """Returns the attributes of a trainer under which TRL's code calls the model once: the rest is in the batch."""
        return {"precompute_ref_logps": True}

    def gathered(self, trainer: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of a trainer under which TRL's code gathers nothing before the first figure."""
        return {}

    def mean(self, local: Tensor) -> Tensor:
        """Returns the loss, a scalar, from the local variable."""
        return local

    def batch_factor(self, num_parts: int, dp_size: float) -> float:
        """Returns the factor of the loss of a micro-batch: TRL averages over micro-batches and ranks."""
        return 1 / num_parts

    def prepare(self, trainer: Any, inputs: Any) -> Any:
        """Returns a batch on the device with labels, and with the log-probabilities of the reference. Collective."""
        batch = trainer._prepare_inputs(inputs)
        if not trainer.precompute_ref_logps:
            reference = trainer.ref_model or self.evaluated(trainer)
            with together():
                found = zip(self.reference, trainer.compute_ref_log_probs(reference, batch), strict=True)
            batch = {**batch, **{name: value for name, value in found if value is not None}}
        return {**batch, _LABELS: batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)}

    def take_losses(self, trainer: Any, batches: Sequence[Any], found: Sequence[Tensor]) -> Tensor:
        """Returns the losses, and makes TRL's code keep its figures. Collective over the data-parallel ranks."""
        mesh, stock = trainer.helix.mesh, trainer.accelerator
        with torch.no_grad(), trainer.compute_loss_context_manager(), attributes(trainer, **self.known()):
            if mesh.dp_size == 1 or not self.gathers_alike:
                _keep_figures(trainer, batches, found)
            else:
                rows = RowsTogether(mesh)
                with attributes(trainer, accelerator=_OneMessage(stock, mesh, rows)):
                    nowhere = {mode: defaultdict[str, list[float]](list) for mode in trainer._metrics}
                    with attributes(trainer, _metrics=nowhere, _total_train_tokens=0):
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


class StockDPOTrainer(StockPreferenceTrainer):
    """TRL's `DPOTrainer`."""

    trl_class = "trl.trainer.dpo_trainer.DPOTrainer"
    local, reads = "loss", {"entropy"}
    reference = "ref_chosen_logps", "ref_rejected_logps"
    outputs: tuple[str, ...] = ("entropy", "mean_logits", "is_top1")

    def __init__(self, args: Any, model: Any) -> None:
        super().__init__(args, model)
        if args.use_weighting:
            self.outputs = *self.outputs, "log_sum_sq_probs"


class StockKTOTrainer(StockPreferenceTrainer):
    """TRL's `KTOTrainer`, whose loss has a mean over the data-parallel ranks: the divergence of other completions."""

    trl_class = "trl.trainer.kto_trainer.KTOTrainer"
    local, reads = "losses", {"_metrics", "nanmean", "gather_for_metrics", _KL}
    reference = "ref_logps", "ref_KL_logps"
    outputs = "entropy", "mean_logits"
    gathers_alike = False

    def prepare(self, trainer: Any, inputs: Any) -> Any:
        """Returns a batch with the log-probabilities of other completions, and the mean of their divergence [1]."""
        batch = super().prepare(trainer, inputs)
        if not trainer.calculate_KL:
            return batch
        with torch.no_grad(), trainer.compute_loss_context_manager(), together():
            found = getattr(trainer, _KL)(self.evaluated(trainer), _without_labels(batch))
        own = (found - batch["ref_KL_logps"]).mean()
        return {**batch, "KL_logps": found, "kl": trainer.accelerator.gather_for_metrics(own).mean().reshape(1)}

    def known(self) -> dict[str, Any]:
        """Adds the log-probabilities of other completions."""
        return {**super().known(), _KL: lambda model, batch: batch.get("KL_logps")}

    def gathered(self, trainer: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an Accelerator whose gathered value is the mean of the divergence over the ranks."""
        return {
            "accelerator": SimpleNamespace(device=trainer.accelerator.device, gather_for_metrics=lambda _: batch["kl"])
        }

    def mean(self, local: Tensor) -> Tensor:
        """Returns the mean over the rows, as TRL's code does after its figures."""
        return local.nanmean()


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


class _NoFigures:
    """The figures of a trainer before their time."""

    def __getitem__(self, mode: str) -> Any:
        raise _FiguresBegin


class _BeforeFigures:
    """The output of the model for a loss; TRL's code reads the entropy after it."""

    def __init__(self, found: LogProbs) -> None:
        self.log_probs, self.log_sum_sq_probs = found.log_probs, found.log_sum_sq_probs

    @property
    def entropy(self) -> Tensor:
        raise _FiguresBegin


def _local(error: BaseException, code: CodeType, name: str) -> Tensor:
    """Returns a variable of a function that an error has left. No frame of the error stays in a variable: it would keep
    the micro-batch alive until a garbage collection."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    assert trace is not None
    found: Tensor = trace.tb_frame.f_locals[name]
    return found
