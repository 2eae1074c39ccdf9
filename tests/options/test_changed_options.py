"""Options that are changed after the config was made, or after the trainer was built: they work, or are refused."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support import tiny
from transformers import TrainerCallback
from trl import DistillationConfig

from trl_opsd import FixedRollout, OPSDConfig, fingerprint
from trl_opsd.losses import ForwardKL
from trl_opsd.methods import MethodOptions
from trl_opsd.options.table import check_same_options, shared_options

LATE = "when the trainer was built, and its new value"


# ---- Between config and trainer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "`temperature=-1.0`: expected a finite number above 0"),
        ({"learning_rate": float("nan")}, "`learning_rate=nan`"),
        ({"teacher_offload": "disk"}, "`teacher_offload='disk'`: expected one of"),
        ({"divergence": ForwardKL}, "is a class: pass an instance"),
        ({"model_init_kwargs": "{bad"}, "is not JSON"),
        ({"label_smoothing_factor": 0.1}, "has no effect"),
    ],
)
def test_trainer_refuses_option_changed_to_a_bad_value(make_trainer, tmp_path, change, message):
    args = tiny.config(tmp_path)
    for name, value in change.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        make_trainer(args=args)


def test_an_option_changed_inside_a_dict_is_checked_again(make_trainer, tmp_path):
    args = tiny.config(tmp_path, generation_kwargs={"no_repeat_ngram_size": 2})
    args.generation_kwargs["no_repeat_ngram"] = 3
    # The nearest first: the known names are a set, whose order differs from process to process.
    with pytest.raises(ValueError, match="did you mean 'no_repeat_ngram_size' or 'encoder_no_repeat_ngram_size'"):
        make_trainer(args=args)


def test_options_changed_before_the_trainer_is_built_have_their_effect(make_trainer, tmp_path):
    args = tiny.config(tmp_path)
    args.temperature, args.learning_rate, args.divergence, args.bf16 = "0.5", "1e-3", "forward_kl", True
    args.generation_kwargs = '{"no_repeat_ngram_size": 2}'
    trainer = make_trainer(args=args)
    assert trainer.args is args
    assert (trainer.temperature, repr(trainer.divergence), args.learning_rate) == (0.5, "ForwardKL()", 1e-3)
    assert (args.mixed_precision, trainer.accelerator.mixed_precision) == ("bf16", "bf16")
    assert trainer.generation_config.no_repeat_ngram_size == 2


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temperatue", "temperature"),
        ("max_completion_lenght", "max_completion_length"),
        ("learningrate", "learning_rate"),
    ],
)
def test_a_misspelt_option_cannot_be_set_later(tmp_path, name, meant):
    args = tiny.config(tmp_path)
    with pytest.raises(AttributeError, match=rf"`args\.{name} = 5` would have no effect: .*did you mean `{meant}`"):
        setattr(args, name, 5)
    assert not hasattr(args, name)


@pytest.mark.parametrize("name", ["project_name", "temperatures", "run_name_2", "_max_step", "alpha"])
def test_config_takes_attributes_of_the_user(tmp_path, name):
    args = tiny.config(tmp_path)
    setattr(args, name, 5)
    assert getattr(copy.deepcopy(args), name) == 5


@dataclass
class _Suffixed(OPSDConfig):
    suffix: str = "-a"

    def __post_init__(self):
        super().__post_init__()
        self.output_dir += self.suffix


def test_post_init_of_a_subclass_runs_once(make_trainer, tmp_path):
    trainer = make_trainer(args=_Suffixed(**tiny.options(tmp_path / "run")))
    assert trainer.args.output_dir == f"{tmp_path / 'run'}-a"


class Counting(FixedRollout):
    """Notes how many prompts it is asked to complete."""

    def __init__(self) -> None:
        super().__init__(tiny.recorded(tiny.tokenizer()))
        self.asked: list[int] = []

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self.asked.append(len(prompt_ids))
        return super().complete(prompt_ids, step)


# ---- After the trainer is built -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_completion_length", 5, "build a trainer with that value"),
        ("temperature", 2.0, "build a trainer with that value"),
        ("beta", 0.0, "assign `trainer.divergence`"),
        ("divergence", "forward_kl", "assign `trainer.divergence`"),
        ("generation_kwargs", {"num_beams": 2}, "build a trainer"),
        ("teacher_prompt_template", "{privileged_context}{prompt}", "build a trainer"),
        ("per_device_train_batch_size", 4, "build a trainer"),
        ("bf16", True, "build a trainer"),
        ("phase_timeout", 1.0, "build a trainer"),
        ("report_to", ["tensorboard"], "build a trainer"),
        ("report", True, "build a trainer"),
    ],
)
def test_option_changed_after_construction_is_refused(make_trainer, name, value, remedy):
    trainer = make_trainer(eval_dataset=tiny.rows())
    setattr(trainer.args, name, value)
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=f"`args.{name}` was .* {LATE}.*{remedy}"):
            run()


def test_change_within_training_is_refused_before_next_rollout(make_trainer):
    class Longer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.max_completion_length += 8

    trainer = make_trainer(callbacks=[Longer()])
    with pytest.raises(ValueError, match=r"`args.max_completion_length` was read as 24 .* new value 32"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-2},
        {"learning_rate": "1e-2"},
        {"max_steps": 2},
        {"max_steps": -1, "num_train_epochs": 2},
        {"lr_scheduler_type": "linear"},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 1e-3},
        {"weight_decay": 0.5},
        {"loss_chunk_tokens": 3},
    ],
    ids=lambda change: ", ".join(change),
)
def test_options_that_are_read_later_may_be_changed_before_training(make_trainer, trained, change):
    late = make_trainer()
    for name, value in change.items():
        setattr(late.args, name, value)
    late.train()
    early = trained(**change)
    assert late.state.global_step == early.state.global_step
    pairs = zip(late.model.parameters(), early.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_late_change_to_a_bad_value_is_refused(make_trainer):
    trainer = make_trainer()
    trainer.args.learning_rate = "fast"
    with pytest.raises(ValueError, match="`learning_rate='fast'`: expected a number"):
        trainer.train()


# ---- During a training, and between two -----------------------------------------------------------------------------


class Changing(TrainerCallback):
    """Changes an option at the end of a step, or of a micro-step."""

    def __init__(self, name: str, value: Any, event: str = "on_step_end") -> None:
        self.name, self.value = name, value
        setattr(self, event, self.change)

    def change(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        setattr(args, self.name, self.value)


@pytest.mark.parametrize(
    ("name", "value", "event"),
    [
        ("gradient_accumulation_steps", 4, "on_step_end"),
        ("gradient_accumulation_steps", 4, "on_substep_end"),
        ("learning_rate", 1e-2, "on_step_end"),
        ("max_steps", 9, "on_step_end"),
        ("logging_steps", 5, "on_step_end"),
        ("weight_decay", 0.5, "on_step_end"),
    ],
)
def test_option_read_at_train_cannot_change_within_it(make_trainer, name, value, event):
    trainer = make_trainer(callbacks=[Changing(name, value, event)], gradient_accumulation_steps=2)
    with pytest.raises(
        ValueError, match=rf"`args\.{name}` was read as .* when the training began, .* change it between two"
    ):
        trainer.train()
    assert trainer.state.global_step == (1 if event == "on_step_end" else 0)


@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 0.5), ("nonfinite", "skip"), ("save_total_limit", 1)])
def test_option_read_each_step_may_change_within_a_training(trained, name, value):
    trainer = trained(callbacks=[Changing(name, value)])
    assert trainer.state.global_step == 3


def test_accumulation_may_be_changed_between_two_trainings(trained):
    trainer = trained(rollout=Counting(), max_steps=1)
    trainer.args.gradient_accumulation_steps = 3
    trainer.train()
    assert trainer.rollout.asked == [2, 6]
    trainer.args.gradient_accumulation_steps = 5
    with pytest.raises(ValueError, match="has 8 rows, but one generation batch needs 10"):
        trainer.train()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"learning_rate": 0.0}, "no weight would change"), ({"max_steps": 0}, "means unset")],
)
def test_zero_rate_or_steps_set_later_are_refused_at_train(make_trainer, change, said):
    trainer = make_trainer()
    for name, value in change.items():
        setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=said):
        trainer.train()


def test_accumulation_cannot_differ_from_that_of_deepspeed(make_trainer, monkeypatch):
    trainer = make_trainer()
    plugin = SimpleNamespace(deepspeed_config={"gradient_accumulation_steps": 1})
    monkeypatch.setattr(trainer.args, "deepspeed_plugin", plugin)
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match=r"`gradient_accumulation_steps` is 1 in the .* DeepSpeed file"):
        trainer.train()


# ---- The tables ----------------------------------------------------------------------------------------------------

_NAMES = {one.name for one in fields(OPSDConfig)}
_READ_ALL = ("dataclasses", *(f"trl_opsd.options.{name}" for name in ("rules", "normalize", "table")))
_READ_ALL_FILES = {sys.modules[name].__file__ for name in _READ_ALL}


class _Recording(OPSDConfig):
    """Records the options that are read, except by code that reads them to check or print them."""

    reads: ClassVar[set[str] | None] = None

    def __getattribute__(self, name: str) -> Any:
        if _Recording.reads is not None and name in _NAMES:
            reader = sys._getframe(1).f_code
            if reader.co_filename not in _READ_ALL_FILES and reader.co_name != "to_dict":
                _Recording.reads.add(name)
        return super().__getattribute__(name)


def test_table_says_which_options_are_read_at_construction_only(make_trainer, tmp_path, monkeypatch):
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    args = _Recording(**tiny.options(tmp_path, **options))
    trainer = make_trainer(args=args, eval_dataset=tiny.rows(), rollout=None)
    monkeypatch.setattr(_Recording, "reads", set())
    trainer.train()
    reads, kept = _Recording.reads, set(trainer._read_once.values)
    monkeypatch.setattr(_Recording, "reads", None)
    declared = {*DistillationConfig.__annotations__, *OPSDConfig.__annotations__, *MethodOptions.__dataclass_fields__}
    declared &= _NAMES
    elsewhere = {"ds3_gather_for_generation", "resume_with_changes", "vllm_sync_check"}
    elsewhere |= {"remove_unused_columns", "eval_temperature", "nonfinite_skip_limit"}
    assert declared - reads - elsewhere <= kept
    proved = {"padding_free", "pad_to_multiple_of"}  # read for each pass, as the models were examined with them
    proved |= {"overlap", "deterministic"}  # read in each step, as other options and methods were checked with them
    proved |= {"num_generations_eval"}  # read for each evaluation
    proved |= {"use_vllm", "sglang_server_url"}  # whose engine bounds the rows of each evaluation
    assert reads & kept <= {*fingerprint.OPTIONS, "report_to", "report", *proved}


@pytest.mark.parametrize("name", ["max_new_tokens", "num_iterations", "warmup_ratio", "max_prompt_length"])
def test_names_of_other_trainers_are_explained_when_they_are_assigned(tmp_path, name):
    with pytest.raises(AttributeError, match=f"`args.{name} = 5` would have no effect: "):
        setattr(tiny.config(tmp_path), name, 5)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("nonfinite", "skpi", "Did you mean 'skip'"),
        ("save_strategy", "step", "not a valid IntervalStrategy|not a valid SaveStrategy"),
        ("loss_chunk_tokens", 0, "`loss_chunk_tokens=0`: expected an integer of at least 1"),
        ("label_smoothing_factor", 0.1, "has no effect: there are no labels"),
        ("auto_find_batch_size", True, "would restart with another generation batch"),
    ],
)
def test_options_changed_after_construction_are_checked_as_at_construction(make_trainer, name, value, words):
    trainer = make_trainer(max_steps=1)
    setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert trainer.state.global_step == 0


def test_options_that_differ_between_processes_are_refused(tmp_path):
    mine = shared_options(tiny.config(tmp_path))
    assert {"seed", "learning_rate", "temperature", "teacher_model_kind", "max_completion_length"} <= mine.keys()
    assert "output_dir" not in mine
    check_same_options([mine, dict(mine)])
    with pytest.raises(ValueError, match="`seed` is 43 in process 1 and 42 in process 0, but all processes train one"):
        check_same_options([mine, {**mine, "seed": 43}])
