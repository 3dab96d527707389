"""Evaluation and prediction under the stock Trainer.

In:   the batches of the stock evaluation loop.
Out:  losses, logits and labels as the stock Trainer's, each sample once.
Must hold: a run whose stock Trainer would return further outputs is refused before the first batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_helix.engine.calls import together
from hf_helix.integrations.trainer.checks import check_evaluation, check_overrides
from hf_helix.integrations.trainer.stock import TrainerAttributes
from hf_helix.integrations.upstream import overrides
from hf_helix.operators.vocabulary.logits import VocabLogits
from hf_helix.runtime.distributed.agreement import agree_on_action
from hf_helix.runtime.failures import activity
from hf_helix.runtime.failures.heartbeat import watched

# The output of `use_cache`, renamed by Transformers 5.24.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

# Flags of a model's configuration, with their additional outputs.
_OUTPUTS = {
    "output_hidden_states": ("hidden_states",),
    "output_attentions": ("attentions",),
    "output_router_logits": ("aux_loss", "router_logits"),
    "use_cache": (_CACHE,),
}


def check_outputs(config: Any, ignore_keys: Sequence[str] | None) -> None:
    """Refuses predictions for which the stock Trainer would return more than logits, by the names of ignored outputs;
    None for those in the configuration. Raises ValueError with the flag and the value to set."""
    if ignore_keys is None:
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", [_CACHE])
    for flag, names in _OUTPUTS.items():
        wanted = [name for name in names if name not in ignore_keys]
        if getattr(config, flag, False) and wanted:
            raise ValueError(
                f"model.config.{flag}=True: predictions would hold {' and '.join(wanted)} beside the logits, which "
                f"HelixTrainer does not collect; set model.config.{flag} = False, or leave them out with "
                f"ignore_keys={sorted({*ignore_keys, *wanted})} (ignore_keys_for_eval in train())"
            )


def _full(value: Any) -> Any:
    return value.full() if isinstance(value, VocabLogits) else value


class EvaluationHooks(TrainerAttributes):
    """The part of `HelixTrainerMixin` that evaluates."""

    _own_gather: Callable[[Any], Any] | None = None

    @overrides("Trainer", otherwise="metrics could be wrong, and a failing rank would leave the others waiting")
    @activity.doing(activity.EVALUATION)
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluates as the stock method does; the failure of a rank ends all ranks. Collective.

        Raises:
            ValueError: the data, or outputs other than the logits, cannot be evaluated.
        """
        check_overrides(self)
        check_evaluation(getattr(dataloader, "dataset", None), self.helix.mesh.dp_size)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not loss_only and not self._has_own_loss:
            check_outputs(self.model.config, ignore_keys)
        with watched():
            name = "predict" if description == "Prediction" else "evaluate"
            agree_on_action(f"trainer.{name}() is called", mesh=self.helix.mesh)
            self._health.check()
            arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
            return super().evaluation_loop(*arguments)  # type: ignore[misc]

    @overrides("Trainer", otherwise="the cut model would be called, which is an error")
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """Runs the forward pass of a batch. Collective.

        Returns:
            The loss, the logits [batch, sequence, vocabulary] and the labels, as the stock method.
        """
        agree_on_action("a batch is evaluated", mesh=self.helix.mesh, given=[inputs])
        if self._has_own_loss:
            return self._own_prediction(self._stock.evaluated(self) or model, inputs, prediction_loss_only, ignore_keys)
        keeps = not prediction_loss_only and "logits" not in (ignore_keys or ())
        if not prediction_loss_only:
            check_outputs(self.model.config, ignore_keys)
        batch = self._prepare_inputs(inputs)
        labels = batch.get("labels")
        scale = self.loss_scale(self._get_num_items_in_batch([batch], self.args.device))
        loss, logits = self.helix.session.evaluate(
            batch, scale, self.state.global_step, keep_logits=keeps, is_compared=True
        )
        known = None if labels is None else self._stock.take_losses(self, [batch], [loss])[0]
        if prediction_loss_only:
            return known, None, None
        return known, logits if keeps else (), labels

    def _own_prediction(self, *arguments: Any) -> Any:
        """Returns the stock method's results of a loss of the user's own, with full logits."""
        decoder = self.helix.session.called_decoder
        if decoder is not None:
            decoder.step = self.state.global_step
        with together(), self._gathering():
            return tree_map(_full, super().prediction_step(*arguments))  # type: ignore[misc]

    @property
    def gather_function(self) -> Callable[[Any], Any]:
        """The function that gathers samples of metrics over the data-parallel ranks, each sample once."""
        return self._own_gather or functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    @gather_function.setter
    def gather_function(self, value: Any) -> None:
        """Takes a function of the user's own. The stock Trainer's may be `accelerator.gather`, which counts every rank
        that shares a batch."""
        is_stock = getattr(getattr(value, "func", value), "__name__", "") in ("gather", "gather_for_metrics")
        self._own_gather = None if is_stock else value
