"""Every method of another package that a class of hf_helix overrides.

In:   nothing.
Out:  a table, which `check` compares with what is installed and docs/upstream.md shows.
Must hold: it has a row for every such method and no other (tests/test_upstream.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Overridden(NamedTuple):
    """A method that a class of ours overrides.

    Attributes:
        owner: the class that has the method, as `module:class`.
        method: its name.
        purpose: what ours does in its place.
        otherwise: what would happen if ours were not called.
        callers: the classes whose code calls it; empty for a method that only users call.
        needs: parameters that ours reads by name, beyond those in its signature.
    """

    owner: str
    method: str
    purpose: str
    otherwise: str
    callers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The owner and the method as one name."""
        return f"{self.owner}.{self.method}"

    @property
    def package(self) -> str:
        """The package that has the method."""
        return self.owner.partition(".")[0]


_TRAINER = "transformers.trainer:Trainer"
_LAYOUT = "accelerate.parallelism_config:ParallelismConfig"
_ACCELERATOR = ("accelerate.accelerator:Accelerator",)


def _trainer(method: str, purpose: str, otherwise: str, by_users: bool = False, needs: str = "") -> Overridden:
    return Overridden(_TRAINER, method, purpose, otherwise, () if by_users else (_TRAINER,), tuple(needs.split()))


def _layout(method: str, purpose: str, otherwise: str, callers: tuple[str, ...] = _ACCELERATOR) -> Overridden:
    return Overridden(_LAYOUT, method, purpose, otherwise, callers)


OVERRIDDEN: tuple[Overridden, ...] = (
    # Training.
    _trainer(
        "_prepare_for_training",
        "refuses overrides that would have no effect, and forgets an unfinished window",
        "a loss of the user's own would be ignored without a word",
    ),
    _trainer(
        "_inner_training_loop",
        "refuses outputs that cannot be collected",
        "evaluations would leave outputs out without a word",
        needs="ignore_keys_for_eval",
    ),
    _trainer(
        "_run_epoch",
        "sets the random generators back to the start of an epoch that is resumed",
        "a resumed run would see its data in another order",
    ),
    _trainer(
        "get_train_dataloader",
        "seeds workers by the data-parallel rank",
        "ranks that share a batch would draw differently in workers",
    ),
    _trainer(
        "get_batch_samples",
        "keeps the micro-batches of an optimizer step for `training_step`, compares them over the ranks, and lets the "
        "engine choose a plan",
        "there would be no window to interleave, and ranks with different data would hang",
    ),
    _trainer(
        "training_step",
        "runs the window through the engine",
        "the cut model would be called, which is an error",
    ),
    _trainer(
        "_clip_grad_norm",
        "clips by the norm over all ranks",
        "each rank would clip by the norm of its own part of the gradient",
    ),
    _trainer(
        "_get_grad_norm",
        "returns the norm over all ranks, and checks that the window has run",
        "the log would show the norm of one rank's part, and nan would not end the run",
    ),
    _trainer(
        "_track_num_input_tokens",
        "counts the tokens of ranks that share a batch once",
        "the log would count tokens several times",
    ),
    _trainer(
        "store_flos",
        "counts the operations of ranks that share a batch once",
        "the log and the checkpoints would count operations several times",
    ),
    _trainer(
        "create_optimizer",
        "with `shard_optimizer` and `shard_parameters`, lets it step this rank's parts of the parameters",
        "it would step stand-ins",
    ),
    _trainer("log", "adds the scorecard to the training loss", "the log would have no figures of overlap"),
    # Construction.
    _trainer(
        "call_model_init",
        "cuts a model that `model_init` has made",
        "every rank would train the whole model by itself",
    ),
    _trainer(
        "_move_model_to_device",
        "moves what this rank holds of the parameters",
        "parameters that are spread would keep memory",
    ),
    _trainer(
        "_build_accelerator_args",
        "gives Accelerate the layout",
        "ranks that share a batch would get different data",
    ),
    _trainer(
        "create_accelerator_and_postprocess",
        "keeps the layout to the trainer's own Accelerator",
        "a second trainer of the process would get the layout of the first",
    ),
    _trainer(
        "get_tp_size",
        "returns the ranks that share a batch",
        "the number of sequences in a step would be wrong",
    ),
    # Evaluation.
    _trainer(
        "evaluation_loop",
        "refuses data whose samples could not be counted once, and names a rank that fails",
        "metrics could be wrong, and a failing rank would leave the others waiting",
    ),
    _trainer(
        "prediction_step",
        "runs forward through the engine, and gathers the logits that are read",
        "the cut model would be called, which is an error",
    ),
    # Hyperparameter search.
    _trainer(
        "hyperparameter_search",
        "refuses what would end a trial on rank 0 alone",
        "the other ranks would wait for a trial that never comes",
        by_users=True,
    ),
    _trainer(
        "_hp_search_setup",
        "checks the arguments that a trial has set",
        "arguments that cannot be honoured would be ignored",
    ),
    _trainer(
        "_report_to_hp_search",
        "reports without asking whether to prune",
        "a pruned trial would end on rank 0 alone",
    ),
    # Checkpoints.
    _trainer(
        "train",
        "checks the checkpoint that training goes on from, and ends all ranks if one fails",
        "a damaged checkpoint would be found half way, and a failing rank would leave the others waiting",
        by_users=True,
    ),
    _trainer(
        "_load_from_checkpoint",
        "each rank reads its slices of the model",
        "whole weights would be loaded into cut parameters, which is an error",
    ),
    _trainer(
        "_load_best_model",
        "each rank reads its slices of the best model",
        "whole weights would be loaded into cut parameters, which is an error",
    ),
    _trainer(
        "_load_optimizer_and_scheduler",
        "each rank reads its slices of the optimizer states",
        "a resumed run would start with empty optimizer states",
    ),
    _trainer(
        "_load_rng_state",
        "sets the random generators, from rank 0's where the layout has changed",
        "a resumed run would draw other random numbers",
    ),
    _trainer(
        "_save_checkpoint",
        "writes into a folder aside that takes its place once it is complete",
        "a run that is killed while it saves would leave a broken checkpoint",
    ),
    _trainer(
        "_get_output_dir",
        "names the folder aside",
        "a run that is killed while it saves would leave a broken checkpoint",
    ),
    _trainer(
        "_push_from_checkpoint",
        "uploads once the checkpoint has its place",
        "an upload would read a folder that is being moved",
    ),
    _trainer("save_model", "saves on every rank", "ranks would wait for rank 0, which waits for them"),
    _trainer(
        "_save",
        "writes an ordinary checkpoint, each rank what it holds",
        "the checkpoint would hold one rank's slices",
    ),
    _trainer(
        "_save_optimizer_and_scheduler",
        "each rank writes its part of the optimizer states",
        "the checkpoint would hold one rank's optimizer states",
    ),
    _trainer(
        "_save_rng_state",
        "saves the random generators now and at the start of the epoch",
        "a resumed run would draw other random numbers",
    ),
    _trainer(
        "create_model_card",
        "adds the layout, the plan and what was measured",
        "the card would not say how the model was trained",
        needs="tags",
    ),
    # The layout, for Accelerate.
    _layout(
        "_validate_accelerator",
        "compares the number of processes with the layout",
        "Accelerate would refuse the layout by rules of its own",
    ),
    _layout("tp_enabled", "is False: parameters are no DTensors", "Accelerate would look for DTensors"),
    _layout("cp_enabled", "is False: there is no FSDP", "Accelerate would switch to FSDP"),
    _layout(
        "get_device_mesh",
        "returns the dimensions by which batches are handed out",
        "ranks that share a batch would get different data",
    ),
    _layout(
        "build_device_mesh",
        "builds the mesh of the run",
        "ranks that share a batch would get different data",
        callers=(_LAYOUT,),
    ),
    _layout("to_json", "returns the options, for logs", "logs would show Accelerate's fields instead", callers=()),
    Overridden(
        "accelerate.scheduler:AcceleratedScheduler",
        "step",
        "steps once for each data-parallel rank",
        "the learning rate would change too fast where ranks share a batch",
        callers=(),
    ),
    *(
        Overridden(
            "torch._C:TensorBase",
            name,
            "is that of the full parameter",
            "scripts would see this rank's part",
            callers=(),
        )
        for name in ("grad", "numel", "requires_grad")
    ),
)
