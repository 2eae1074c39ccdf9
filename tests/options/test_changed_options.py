"""Options that are changed after construction, and what is said of options without effect when a trainer is built."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from support import tiny

from trl_opsd import HFRollout, OPSDConfig
from trl_opsd.losses import ForwardKL
from trl_opsd.options.table import check_same_options, shared_options

# ---- Between config and trainer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("learning_rate", float("nan")), ("divergence", ForwardKL), ("overlap", "never")],
)
def test_trainer_refuses_option_changed_to_a_bad_value(make_trainer, tmp_path, name, value):
    args = tiny.config(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=name):
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


@dataclass
class _Suffixed(OPSDConfig):
    suffix: str = "-a"

    def __post_init__(self):
        super().__post_init__()
        self.output_dir += self.suffix


def test_post_init_of_a_subclass_runs_once(make_trainer, tmp_path):
    trainer = make_trainer(args=_Suffixed(**tiny.options(tmp_path / "run")))
    assert trainer.args.output_dir == f"{tmp_path / 'run'}-a"


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-2, "max_grad_norm": 1e-3, "weight_decay": 0.5},
        {"max_steps": -1, "num_train_epochs": 2, "lr_scheduler_type": "linear"},
        {"max_steps": 2, "gradient_accumulation_steps": 2, "loss_chunk_tokens": 3},
    ],
    ids=", ".join,
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


def test_options_that_differ_between_processes_are_refused(tmp_path):
    mine = shared_options(tiny.config(tmp_path))
    assert {"seed", "learning_rate", "temperature", "teacher_model_kind", "max_completion_length"} <= mine.keys()
    assert "output_dir" not in mine
    check_same_options([mine, dict(mine)])
    with pytest.raises(ValueError, match="`seed` is 43 in process 1 and 42 in process 0, but all processes train one"):
        check_same_options([mine, {**mine, "seed": 43}])


# ---- A teacher that is the student ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "seed", "warnings"), [(32, 0, 1), (48, 1, 0)])
def test_first_divergence_of_zero_warns_once(trained, caplog, width, seed, warnings):
    trained(model=tiny.qwen2(32, 0), teacher_model=tiny.qwen2(width, seed), max_steps=2)
    assert caplog.text.count("The first divergence is 0") == warnings


# ---- What may be trained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"max_steps": 0},
        {"num_train_epochs": 0, "max_steps": -1},
        {"per_device_train_batch_size": 8},
    ],
)
def test_trainer_that_only_evaluates_may_be_frozen(make_trainer, options):
    trainer = make_trainer(
        model=tiny.qwen2().requires_grad_(False), train_dataset=None, eval_dataset=tiny.rows(), **options
    )
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_divergence_may_be_assigned_by_name(make_trainer):
    trainer, expected = make_trainer(), make_trainer(divergence="forward_kl")
    trainer.divergence = "forward_kl"
    assert trainer.divergence == expected.divergence
    assert trainer.train().training_loss == expected.train().training_loss
    with pytest.raises(ValueError, match="forward_kl"):
        trainer.divergence = "forwardkl"


def test_an_evaluation_of_no_rows_is_refused(make_trainer):
    trainer = make_trainer()
    for run in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="the dataset is empty: pass one with rows"):
            run(tiny.rows(0))


def test_teacher_text_beside_student_messages_warns(make_trainer, caplog):
    rows = [{"prompt": [{"role": "user", "content": "2+2="}], "teacher_prompt": "The answer is 4. 2+2="}] * 8
    make_trainer(train_dataset=Dataset.from_list(rows), rollout=HFRollout(), max_steps=1).train()
    assert "The prompts are text for the teacher but messages for the student" in caplog.text
