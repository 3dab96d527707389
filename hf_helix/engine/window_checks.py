"""The checks of a cut model and its batches before windows.

In:   the cut model, and batches.
Out:  errors with a remedy: windows that differ between ranks, values out of range, changes of the model that windows
      would ignore, images where they cannot be.
Must hold: all ranks agree on a window before anything is communicated by a plan.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_helix.engine.advice import Advice
from hf_helix.engine.cut.checks import check_batch, check_trained
from hf_helix.engine.cut_model import CutModel
from hf_helix.models.derived.model_code import check_forwards
from hf_helix.planning.schedule.placement import FRONT
from hf_helix.runtime.distributed.agreement import (
    agree_on_action,
    agree_on_number,
    agree_on_window,
    check_windows,
    shared_number,
)
from hf_helix.runtime.divided import plain_parameters
from hf_helix.runtime.failures.values import Health, Limits, value_bounds
from hf_helix.runtime.notices import say


class WindowChecks:
    """The checks of a run.

    Args:
        cut: the model.
        trained_at_cut: whether each parameter was trained when the model was cut.
        limits: the bounds of the ids, labels and positions of batches.
        advice: a faster layout, said before the first window.

    Attributes:
        limits: as given.
    """

    def __init__(self, cut: CutModel, trained_at_cut: Sequence[bool], limits: Limits, advice: Advice) -> None:
        self._cut = cut
        self.limits = limits
        self._advice = advice
        self._parameters = tuple(cut.model.parameters())
        self._trained_at_cut = list(trained_at_cut)
        self._trained_then: list[bool] = []  # whether the last window trained each parameter
        self._hooks: list[int] = []  # the number of hooks of each module at the last check
        self._has_said_images = False

    # -- batches ---------------------------------------------------------------------------------------------------

    def agree(self, batches: Sequence[Any], health: Health | None = None) -> None:
        """Compares the windows of the ranks before they run: the number of micro-batches, and the batches of ranks that
        share them; refuses ids, labels and positions that are out of range. Collective.

        Args:
            batches: the micro-batches of a window; empty if there is none.
            health: of the step before; None if nobody notes it.

        Raises:
            FloatingPointError: the step before had a loss or a gradient that is not finite, on any rank.
            ValueError: the windows differ, or values are out of range.
        """
        mesh = self._cut.mesh
        numbers = [shared_number(batches, mesh), *([] if health is None else [health.state()])]
        message = torch.stack([number.to(mesh.device) for number in numbers])
        looks = not self._cut.ends_at_decoder  # calls are checked one by one
        if looks:
            message = torch.cat((message, self.value_bounds(batches)))
        of_ranks = agree_on_number(len(batches), mesh.device, message)
        if health is not None:
            health.raise_if_invalid([row[1] for row in of_ranks])
        if looks:
            self.limits.raise_if_invalid([row[len(numbers) :] for row in of_ranks])
        check_windows(batches, [row[0] for row in of_ranks], mesh)

    def value_bounds(self, batches: Sequence[Any]) -> Tensor:
        """Returns the largest ids, labels and positions of a window, for `limits.raise_if_invalid`, on the device."""
        return value_bounds(batches, self._cut.mesh.device)

    def check_values(self, batch: Any) -> None:
        """Refuses a batch outside of a window by `limits.raise_if_invalid`. Waits for the device."""
        self.limits.raise_if_invalid([self.value_bounds([batch]).tolist()])

    def check_window(self, batches: Sequence[Mapping[str, Any]], is_compared: bool = False) -> None:
        """Checks the model and the batches of a window before it is trained. Collective.

        Args:
            batches: of the data collator, on the device.
            is_compared: whether ranks that share the batches have compared them.
        """
        self.check_trainable()
        check_batch(batches[0])
        if not is_compared:
            agree_on_window(batches, self._cut.mesh.batch_group)
        self._advice.say(batches)
        self._cut.model.train()
        self._check_stages(batches)
        self._check_replicas(batches)

    # -- the model -------------------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Refuses changes of the model since it was cut, and hooks that would never run."""
        cut = self._cut
        cut.snapshot.check(with_types=cut.mesh.pipe.size > 1 or cut.mesh.cp.size > 1)
        hooks = cut.snapshot.count_hooks()
        if hooks != self._hooks:
            check_forwards(cut.model, cut.base, cut.family, list(cut.modules_run_as_is), cut.ends_at_decoder)
            self._hooks = hooks

    @plain_parameters()
    def check_trainable(self) -> None:
        """Refuses changes of the model since it was cut, before a window is trained. Collective on a model with
        buffers."""
        cut = self._cut
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained_then:
            check_trained(cut.model, cut.rank_units, cut.trains)
            if trained != self._trained_at_cut and cut.rank_units.layout.reductions:
                say(
                    "parameters were frozen or unfrozen after the model was cut: gradients are reduced at the end of "
                    "an optimizer step, without overlap; freeze them before the trainer is made"
                )
            self._trained_then = trained
        self.check_unchanged()
        cut.snapshot.check_trainable()
        cut.align_buffers("a window is trained")

    # -- images ----------------------------------------------------------------------------------------------------

    def _check_stages(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Refuses features of images beyond the first stage; prints once that the split of layers over stages counts no
        tower."""
        config, family = self._cut.config, self._cut.family
        if config.pp_size > 1 and any(map(family.reads_images, batches)):
            first, needed = self._first_layers, family.first_least
            if first < needed:
                raise ValueError(
                    f"the first pipeline stage has {first} whole layers, and images add features behind {needed}; use "
                    f"layers_per_stage with {needed} or more at its start, or a smaller pp_size than {config.pp_size}"
                )
        splits, towers = (
            config.pp_size > 1 and config.layers_per_stage is None and not config.image_share,
            family.towers,
        )
        if splits and towers is not None and not self._has_said_images and towers.have_images(batches[0]):
            say(
                "the batch has images, and the split of layers over pipeline stages counts no tower: use image_share="
                f"{towers.share_of(batches[0]):.2f}, the part of this batch's tokens that are of images, or the "
                "layers_per_stage of hf-helix doctor"
            )
            self._has_said_images = True

    def _check_replicas(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Refuses a step in which only some replicas have gradients of a tower. Collective with trained towers."""
        mesh, family = self._cut.mesh, self._cut.family
        if mesh.dp_size == 1 or not family.trains_towers():
            return
        has_images = any(map(family.reads_images, batches))
        if all(agree_on_action("a window is trained", [has_images, not has_images])):
            raise ValueError(
                f"with {mesh.dp_size} data-parallel ranks, some have images in a step and others have none, and "
                "the towers are trained: freeze them (requires_grad_(False) before the trainer is made), give every "
                "micro-batch an image, or use tp_size, cp_size or pp_size for all ranks"
            )

    @functools.cached_property
    def _first_layers(self) -> int:
        """The number of whole layers of the first pipeline stage that has layers."""
        layout = self._cut.rank_units.layout
        stages = ([layout.units[unit] for unit in layout.chunks[stage]] for stage in sorted(layout.chunks))
        wholes = ([n for n in names if layout.graphs[n].forward.repeats and FRONT not in n] for names in stages)
        return len(next(filter(None, wholes), []))
