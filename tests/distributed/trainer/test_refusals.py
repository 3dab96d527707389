"""Bad input is refused at construction, on every rank, naming the option and a value that works."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from support.jobs import Stream, build, construct, make_trainer
from support.loop_jobs import said
from support.marks import slow
from support.models import arguments, llama, sequences, tiny
from transformers import RwkvConfig, RwkvForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from hf_helix import HelixConfig, HelixPlugin, HelixTrainer, HelixTrainerMixin
from hf_helix.engine.cut.checks import check_placements
from hf_helix.planning.schedule.actions import format_schedule
from hf_helix.planning.schedule.named import build_schedule

FIVE_LAYERS = {"num_hidden_layers": 5}

# -- what the ranks run ------------------------------------------------------------------------------------------------


def train_on_data_of_rank(folder: str) -> None:
    """Every rank brings other data, as with an iterable dataset shuffled without a common seed."""
    make_trainer(folder, {"tp_size": 2}, data={"seed": torch.distributed.get_rank()}).train()


def call_the_cut_model(folder: str) -> None:
    """With gradients, past the Trainer."""
    make_trainer(folder, {"tp_size": 2}).model(input_ids=torch.tensor([[1, 2]]))


def cut_twice(folder: str) -> None:
    """Two trainers in a row on one model."""
    model = llama()
    for _ in range(2):
        HelixTrainer(model=model, args=arguments(folder), helix_config=HelixConfig(tp_size=2))


def own_rank() -> int:
    """Also before there is a process group."""
    return int(os.environ["RANK"])


def construct_by_rank(folder: str, by_rank: Sequence[dict[str, Any]]) -> None:
    """Every rank brings other options."""
    construct(folder, by_rank[own_rank()], model=FIVE_LAYERS)


class OwnLength(Stream):
    """A stream that ends at another place on every data-parallel rank."""

    def __init__(self, rows: list[dict[str, Any]], lengths: Sequence[int], ranks_per_batch: int) -> None:
        super().__init__(rows[: lengths[own_rank() // ranks_per_batch]])


def train_on_streams_of_other_lengths(folder: str, helix: dict[str, Any], lengths: Sequence[int]) -> None:
    """Streams that end early on some data-parallel ranks."""
    dataset = OwnLength(sequences(60), lengths, HelixConfig(**helix).ranks_per_batch)
    training = {"max_steps": 6, "gradient_accumulation_steps": 3, "accelerator_config": {"dispatch_batches": False}}
    build(folder, helix, training, model=llama(**FIVE_LAYERS), train_dataset=dataset).train()


def train_with_accumulation_of_rank(folder: str, helix: dict[str, Any], late: bool) -> None:
    """Windows of another number of micro-batches on every rank; `late`: from after construction on."""
    steps = 2 + own_rank()
    training = {"gradient_accumulation_steps": 2 if late else steps, "max_steps": 2}
    trainer = make_trainer(folder, helix, model=FIVE_LAYERS, training=training)
    trainer.args.gradient_accumulation_steps = steps
    trainer.train()


def train_after_a_failed_search(folder: str) -> tuple[str, int]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = {"model_init": lambda: tiny(num_hidden_layers=2), "train_dataset": sequences(count=8)}
    trainer: Any = build(folder, {"tp_size": 2, "plan": "sequential", "cache": False}, {"max_steps": 1}, **options)
    words = said(lambda: trainer.hyperparameter_search(hp_space=lambda _: {"fp16_full_eval": True}, n_trials=1))
    trainer.args.fp16_full_eval = False
    return words, trainer.train().global_step


# -- the tests --------------------------------------------------------------------------------------------------------


def test_problems_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)auto_find_batch_size.*optim"):
        make_trainer(str(tmp_path), {}, training={"optim": "lomo", "auto_find_batch_size": True})
    # Fields set by hand are seen too.
    args = arguments(str(tmp_path))
    args.fp16, args.fsdp, args.deepspeed = True, "full_shard", "ds.json"
    with pytest.raises(ValueError, match=r"(?s)fp16.*deepspeed.*fsdp"):
        HelixTrainer(model=llama(), args=args, helix_config=HelixConfig())


def test_models_that_are_refused(tmp_path: Path) -> None:
    def refuse(model: Any, match: str, **training: Any) -> str:
        with pytest.raises(ValueError, match=match) as caught:
            build(str(tmp_path), {}, training, model=model)
        return str(caught.value)

    rwkv = RwkvForCausalLM(RwkvConfig(num_hidden_layers=2, hidden_size=8, vocab_size=16))
    said = refuse(rwkv, r"RwkvForCausalLM cannot be derived: ")
    for word in ("register_model", "hf-helix models", "docs/adding_a_model.md"):
        assert word in said
    refuse(llama().half(), r"float16.*dtype=torch.float32.*dtype=torch.bfloat16")
    mixed = llama()
    mixed.lm_head.bfloat16()
    refuse(mixed, r"lm_head.weight is torch.bfloat16, others are torch.float32.*one type")
    with pytest.raises(ValueError, match=r"no operator for model\.embed_tokens\.weight"):
        check_placements(llama(), set(llama().parameters()))
    # The stock Trainer takes the smoothed loss instead of the model's, balance and all.
    words = r"label_smoothing_factor=0.1.*label_smoothing_factor=0.0.*output_router_logits"
    refuse(tiny("mixtral", output_router_logits=True), words, label_smoothing_factor=0.1)


def test_mixed_precision_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` hands it over in the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"mixed_precision='fp16'.*bf16.*scaler"):
        make_trainer(str(tmp_path), {})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = make_trainer(str(tmp_path), {})
    assert trainer.helix.runner.precision.autocast_dtype is torch.bfloat16


def test_batches_without_labels(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in sequences(4)]
    trainer = HelixTrainer(model=llama(), args=arguments(str(tmp_path)), train_dataset=rows, helix_config=HelixConfig())
    with pytest.raises(ValueError, match=r"no labels.*DataCollatorForLanguageModeling"):
        trainer.train()


def test_measurements_that_cannot_be(tmp_path: Path) -> None:
    trainer = make_trainer(str(tmp_path), {}, training={"max_steps": 1})
    with pytest.raises(ValueError, match="after train"):
        trainer.measure_overlap()
    trainer.train()
    with pytest.raises(ValueError, match="repeats=0"):
        trainer.measure_overlap(repeats=0)


def test_one_process_and_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tp_size=2 must divide.*1 process.*values that work: 1\..*MULTI_GPU"):
        make_trainer(str(tmp_path), {"tp_size": 2})


def test_ranks_that_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes, but this one runs alone.*use_cpu=True"):
        HelixTrainer(model=llama(), args=args, helix_config=HelixConfig(tp_size=2))


PHIMOE = {"family": "phimoe", "num_hidden_layers": 2}
FIVE = {**PHIMOE, "num_local_experts": 5}
GROK, REBALANCED = {"optim": "grokadamw"}, {"train_sampling_strategy": "batch_rebalance"}
UNEVEN, DISPATCHED = ({"accelerator_config": given} for given in ({"even_batches": False}, {"dispatch_batches": True}))


def refused(helix: Any, words: list[str], model: Any = None, training: Any = None) -> Any:
    """The options of a run on two ranks, and words of its error."""
    return pytest.param(helix, model or {}, training or {}, words, id=f"{helix}-{model or {}}-{training or {}}")


TP, PP, CP, EP = ({f"{axis}_size": 2} for axis in ("tp", "pp", "cp", "ep"))
FEW_HEADS = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
TIED = {**FIVE_LAYERS, "tie_word_embeddings": True}
LAYOUTS = [
    refused({"tp_size": 3}, ["tp_size=3", "world size, 2", "1, 2"]),
    refused(TP, ["3 attention heads", "work: 1, 3"], FEW_HEADS),
    refused({**TP, **PP}, ["pp_size=2", "1 process that tp_size=2 leaves of 2", "work: 1"]),
    refused(PP, ["the model has 3 layers", "pp_size=2 needs at least 4", "largest pp_size that fits is 1"]),
    refused(
        {**PP, "layers_per_stage": [1, 1, 1, 1]},
        ["add up to 4", "the model's 5 layers", "such as layers_per_stage=["],
        FIVE_LAYERS,
    ),
    refused({**PP, "layers_per_stage": [1, 1, 2, 1], "schedule": "1f1b"}, ["has 4 counts", "it needs 2"], FIVE_LAYERS),
    refused(
        {**PP, "schedule": "1f1b"},
        ["shares a weight", "tied embeddings", "schedule='auto'", "tie_word_embeddings=False"],
        TIED,
    ),
    refused(CP, ["attention_dropout=0.1", "attention_dropout=0.0"], {"attention_dropout": 0.1}),
    refused(CP, ["flex_attention", "log-sum-exp", "sdpa"], {"attn_implementation": "flex_attention"}),
    refused(EP, ["ep_size=2", "5 experts", "ep_size: 1, 5"], FIVE),
    refused({"ep_size": 4}, ["ep_size=4 must divide the world size, 2 processes", "data-parallel", "1, 2"], PHIMOE),
    refused({**EP, **TP}, ["ep_size=2 must divide the 1 process that tp_size=2 leaves of 2"], PHIMOE),
    refused(EP, ["ep_size", "LlamaForCausalLM has no experts", "ep_size=1"]),
    refused({"expert_capacity_factor": 2.0}, ["expert_capacity_factor=None", "no experts"], {"family": "gpt2"}),
    refused(TP, ["tp_size=2", "5 experts", "a tp_size that divides 5"], FIVE),
    refused({"shard_parameters": True, "shard_optimizer": True}, ["shard_optimizer=False"]),
    refused({"shard_parameters": True}, ["shard_parameters=True a rank holds only a part"], training=GROK),
    refused({"shard_optimizer": True}, ["optim='grokadamw'", "shard_optimizer=True"], training=GROK),
    refused(TP, ["optim='grokadamw'", "tp_size=2", "optim='adamw_torch'"], training=GROK),
    refused(
        PP,
        ["optim='grokadamw'", "pp_size=2", "optim='adamw_torch'", "optim='adamw_bnb_8bit'"],
        {"num_hidden_layers": 4},
        {"optim": "grokadamw"},
    ),
    refused({}, ["'even_batches': False", "2 data-parallel ranks", "'even_batches': True"], training=UNEVEN),
    refused({}, ["'dispatch_batches': True", "2 data-parallel ranks", "'dispatch_batches': False"], None, DISPATCHED),
    refused(TP, ["train_sampling_strategy='batch_rebalance'", "'group_by_length'"], None, REBALANCED),
]


@pytest.mark.parametrize(("helix", "model", "training", "words"), LAYOUTS)
def test_what_some_layouts_refuse(
    helix: Any, model: Any, training: Any, words: list[str], cluster_of: Any, tmp_path: Path
) -> None:
    options = {"helix": {"cache": False, **helix}, "model": model, "training": training}
    cluster_of(2).assert_raises("construct", *words, alike=True, folder=str(tmp_path), **options)


def test_a_stream_to_evaluate_on(cluster_of: Any, tmp_path: Path) -> None:
    training = {"accelerator_config": {"dispatch_batches": False}}
    job = {"folder": str(tmp_path), "helix": {}, "training": training, "eval_dataset": Stream(sequences(4))}
    cluster_of(2).assert_raises("construct", "iterable dataset", "2 data-parallel ranks", "list(dataset)", **job)


def test_plan_files(cluster_of: Any, tmp_path: Path) -> None:
    cluster, path = cluster_of(2), tmp_path / "plan.json"
    helix = {"tp_size": 2, "plan": "round_robin"}
    text = cluster.run("save_plan", folder=str(tmp_path), helix=helix, path=str(path))[0]

    def message(content: str, **options: Any) -> str:
        path.write_text(content)
        helix = {"tp_size": 2, "plan": str(path), **options.pop("helix", {})}
        job = {"folder": str(tmp_path), "helix": helix, **options}
        return cluster.assert_raises("construct", "plan='auto'", alike=True, **job)[0]

    assert "mesh" in message(text, helix={"tp_size": 1})
    assert "damaged" in message(text[: len(text) // 2])
    swapped = json.loads(text)
    order = swapped["blocks"]["F.layer | B.layer"]
    order[0], order[-1] = order[-1], order[0]
    assert "-->" in message(json.dumps(swapped))


def test_plugin_and_trainer_take_options_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        HelixPlugin(HelixConfig(), tp_size=1)
    with pytest.raises(ValueError, match=r"did you mean 'tp_size'"):
        HelixPlugin(tp_sise=2)
    with pytest.raises(TypeError, match="must be a HelixConfig"):
        HelixTrainer(model=llama(), args=arguments(str(tmp_path)), helix_config={"tp_size": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "kind", "words"),
    [
        (
            train_on_data_of_rank,
            "ValueError",
            ["got different batches: input_ids, labels differ", "split_dataset_by_node", "seed"],
        ),
        (call_the_cut_model, "RuntimeError", ["save_model"]),
        (cut_twice, "ValueError", ["cut by an earlier HelixTrainer", "from_pretrained"]),
    ],
)
def test_what_two_ranks_refuse(job: str, kind: str, words: list[str], cluster_of: Any, tmp_path: Path) -> None:
    cluster_of(2).assert_raises(job, *words, raises=kind, folder=str(tmp_path))


class Twice(Trainer):
    """Trains every micro-batch twice."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        super().training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


class CutTwice(HelixTrainerMixin, Twice):
    """With an override that the mixin would hide."""


class Alone(Trainer):
    """With a step of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


class CutAlone(HelixTrainerMixin, Alone):
    """With an override that would hide the mixin's in front of it, too."""


class CutSeq2Seq(HelixTrainerMixin, Seq2SeqTrainer):
    """With an override of Transformers that the mixin would hide."""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (CutTwice, r"Twice.training_step is never called; write .*`class CutTwice\(Twice, CutTrainer\)`"),
        (CutAlone, r"Alone.training_step is never called; in front it would hide the mixin's, .* in compute_loss"),
        (CutSeq2Seq, r"Seq2SeqTrainer.prediction_step is never .*`class CutSeq2Seq\(Seq2SeqTrainer, CutTrainer\)`"),
    ],
)
def test_overrides_that_the_mixin_would_hide(kind: Any, words: str, tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=words):
        kind(model=llama(), args=args, helix_config=HelixConfig())


def test_overrides_before_the_mixin_run(tmp_path: Path) -> None:
    """As the error says to write; a second run of the same micro-batch adds to its gradients."""

    def norms(kind: Any, **options: Any) -> list[float]:
        args = arguments(str(tmp_path), max_steps=2, gradient_accumulation_steps=1, logging_steps=1, optim="sgd")
        trainer = kind(model=llama(), args=args, train_dataset=sequences(8), **options)
        trainer.train()
        return [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]

    cut = type("CutTwice", (Twice, HelixTrainer), {})
    assert norms(cut, helix_config=HelixConfig()) == pytest.approx(norms(Twice), abs=1e-4)


def test_optimizers_that_may_look_at_the_whole_model(tmp_path: Path) -> None:
    model, config = llama(), HelixConfig(shard_optimizer=True)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match=r"optimizers=\(LBFGS, .*use one of AdamW"):
        HelixTrainer(model=model, args=arguments(str(tmp_path)), optimizers=(optimizer, None), helix_config=config)
    kind = type("OwnStep", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    with pytest.raises(ValueError, match=r"optimizer_cls_and_kwargs=\(OwnStep, .*use one of AdamW"):
        make_trainer(str(tmp_path), {"shard_optimizer": True}, optimizer_cls_and_kwargs=(kind, {"lr": 1e-3}))


def test_no_training_arguments_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock Trainer makes its own; so do we."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for trainer in (
        HelixTrainer(llama(), helix_config=HelixConfig()),
        HelixTrainer(llama(), None, helix_config=HelixConfig()),
    ):
        assert trainer.args.output_dir == "tmp_trainer"


def test_training_after_a_failed_search(cluster_of: Any, tmp_path: Path) -> None:
    for words, steps in cluster_of(2).run(train_after_a_failed_search, folder=str(tmp_path)):
        assert "use fp16_full_eval=False" in words
        assert steps == 1


# -- ranks that do not agree, and schedules that do not fit ---------------------------------------------------------

PIPE = {"pp_size": 2, "plan": "greedy"}

GOOD = format_schedule(build_schedule("folded_1f1b", 2, 3))


def with_file(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "actions.txt"
    path.write_text(text)
    return {**PIPE, "schedule": str(path)}


def test_action_files_that_do_not_fit(cluster_of: Any, tmp_path: Path) -> None:
    helix = with_file(tmp_path, format_schedule(build_schedule("folded_1f1b", 3, 4)))
    said = "lines for 3 ranks and pp_size=2 needs 2"
    job: dict[str, Any] = {"folder": str(tmp_path), "model": FIVE_LAYERS, "alike": True}
    cluster_of(2).assert_raises("construct", said, helix=helix, **job)
    # Said before anything is trained: the number of micro-batches is known.
    helix = with_file(tmp_path, GOOD)
    training = {"gradient_accumulation_steps": 4}
    words = helix["schedule"], "is for 3 micro-batches and the window has 4", "schedule='auto'"
    cluster_of(2).assert_raises("construct", *words, helix=helix, training=training, **job)


def test_an_action_file_for_more_micro_batches_serves(cluster_of: Any, tmp_path: Path) -> None:
    """What is missing is left out, the losses are the named schedule's, and evaluation makes do with it, too."""
    training = {"gradient_accumulation_steps": 2, "max_steps": 3, "per_device_eval_batch_size": 5}
    job = {"folder": str(tmp_path), "training": training, "model": FIVE_LAYERS}
    result = [cluster_of(2).run("train", helix=helix, **job)[0] for helix in (PIPE, with_file(tmp_path, GOOD))]
    assert result[0]["losses"] == result[1]["losses"]
    assert result[0]["eval"] == pytest.approx(result[1]["eval"], abs=1e-5)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"schedule": "folded_1f1b"}, {"schedule": "dualpipe_v"}, "options"),
        ({"plan": "greedy"}, {"plan": "sequential"}, "plans"),
    ],
)
def test_ranks_with_other_options(one: Any, other: Any, said: str, cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "by_rank": [{**PIPE, **one}, {**PIPE, **other}]}
    words = f"rank 0 and rank 1 have different {said}: line"
    cluster_of(2).assert_raises(construct_by_rank, words, alike=True, **job)


def test_ranks_with_other_action_files(cluster_of: Any, tmp_path: Path) -> None:
    """They begin alike, so that a window of one micro-batch would not show it."""
    text = format_schedule(build_schedule("folded_1f1b", 2, 6))
    texts = [text, text.replace(" 0B5", " 0I5 0W5")]
    by_rank = []
    for rank, text in enumerate(texts):
        (tmp_path / str(rank)).mkdir()
        by_rank.append(with_file(tmp_path / str(rank), text))
    job = {"folder": str(tmp_path), "by_rank": by_rank}
    said = "rank 0 and rank 1 have different options: line"
    cluster_of(2).assert_raises(construct_by_rank, said, alike=True, **job)


@pytest.mark.parametrize("helix", [PIPE, {"plan": "greedy"}], ids=str)
def test_windows_of_other_lengths(helix: dict[str, Any], cluster_of: Any, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "helix": helix, "alike": True}
    words = "windows of different length (micro-batches by rank: [2, 3])", "max_steps"
    cluster_of(2).assert_raises(train_with_accumulation_of_rank, *words, late=True, **job)
    said = "'gradient_accumulation_steps=2' against 'gradient_accumulation_steps=3'"
    cluster_of(2).assert_raises(train_with_accumulation_of_rank, said, late=False, **job)


@pytest.mark.parametrize(
    ("processes", "helix", "counts"),
    [(2, {}, [2, 3]), slow(4, PIPE, [2, 2, 3, 3])],
    ids=str,
)
def test_a_dataset_that_ends_early_on_some_ranks(
    processes: int, helix: dict[str, Any], counts: list[int], cluster_of: Any, tmp_path: Path
) -> None:
    """Streams of 32 and 40 samples, of which each of two ranks gets half: 8 and 10 batches of 2, in windows of 3."""
    job = {"folder": str(tmp_path), "helix": helix, "lengths": [32, 40], "alike": True}
    words = [f"micro-batches by rank: {counts}", "the dataset of some ranks ends before that of the others"]
    words += ["Give every data-parallel rank as many samples", "max_steps"]
    cluster_of(processes).assert_raises(train_on_streams_of_other_lengths, *words, **job)


def test_a_dataset_that_ends_between_windows(cluster_of: Any, tmp_path: Path) -> None:
    """One rank has a window more, the other nothing at all."""
    job = {"folder": str(tmp_path), "helix": PIPE, "lengths": [24, 36], "alike": True}
    said = "micro-batches by rank: [0, 0, 3, 3]"
    cluster_of(4).assert_raises(train_on_streams_of_other_lengths, said, **job)
