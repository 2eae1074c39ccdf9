"""What is assigned to a trainer later is checked as an argument is, or refused; names of one's own are free."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from support import tiny

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.options.foreign_names import COPIED, PASSED, check_attribute


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> OPSDTrainer:
    """A trainer that no test changes."""
    return OPSDTrainer(
        tiny.qwen2(32, seed=0),
        tiny.qwen2(48, seed=1),
        tiny.config(tmp_path_factory.mktemp("built"), per_device_train_batch_size=4),
        tiny.rows(),
        tiny.rows(2),
        tiny.tokenizer(),
    )


# ---- Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("learning_rate", "it is an option: assign to `args.learning_rate`"),
        ("teacher_update_rate", "it is an option"),
        ("max_completion_length", "it is an option"),
        ("top_p", "it is an option"),
        ("learning_rat", "did you mean `learning_rate`"),
        ("teacher_mode_kind", "did you mean `teacher_model_kind`"),
        ("max_prompt_length", "prompts are never cut"),
        ("num_iterations", "each completion is used for one optimizer step"),
    ],
)
def test_assigning_an_option_to_the_trainer_is_refused(built, name, said):
    before = getattr(built, name, None)
    with pytest.raises(AttributeError, match=rf"^`trainer\.{name} = 7` would have no effect: .*{said}"):
        setattr(built, name, 7)
    assert getattr(built, name, None) is before


@pytest.mark.parametrize(
    "name",
    ["history", "rollouts", "divergences", "my_divergence", "train_dataset_2", "models", "best", "_beta", "gamma"],
)
def test_new_attribute_names_are_free(built, name):
    setattr(built, name, 1)
    assert getattr(built, name) == 1


def test_a_subclass_may_keep_options_under_their_names(make_trainer):
    class Mine(OPSDTrainer):
        output_dir: str | None = None

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seed, self.output_dir = self.args.seed, "elsewhere"

    trainer = make_trainer(Mine)
    assert (trainer.seed, trainer.output_dir) == (42, "elsewhere")


def test_every_attribute_that_the_libraries_assign_may_be_assigned(built):
    trees = [
        ast.parse(inspect.getsource(inspect.getmodule(cls))) for cls in (transformers.Trainer, trl.DistillationTrainer)
    ]
    targets = {node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {node.attr for node in targets if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    assert len(names) > 50
    for name in names.difference(COPIED, PASSED):  # which they assign at construction alone
        check_attribute(built, built.args, name, object())


# ---- Rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([{"prompt": "a"}] * 8, TypeError, "is a list"),
        (Dataset.from_dict({"question": ["a"] * 8}), ValueError, "'prompt'"),
        (Dataset.from_dict({"prompt": ["x" * 300] * 8}), ValueError, "row 0 of {name} .*300"),
        (Dataset.from_dict({"prompt": ["a"] * 7 + [""]}), ValueError, "row 7 of {name}"),
    ],
    ids=["type", "column", "overlong", "empty"],
)
def test_assigned_datasets_are_checked_like_arguments(built, rows, error, said):
    for name in ("train_dataset", "eval_dataset"):
        before = dict(vars(built))
        with pytest.raises(error, match=said.format(name=name)):
            setattr(built, name, rows)
        assert vars(built) == before


def test_too_few_rows_or_none_to_evaluate_are_refused(built, make_trainer):
    with pytest.raises(ValueError, match="has 2 rows, but one generation batch needs 4"):
        built.train_dataset = tiny.rows(2)
    trainer = make_trainer(eval_strategy="steps", eval_dataset=tiny.rows(2))
    with pytest.raises(ValueError, match="`eval_strategy='steps'` without an `eval_dataset`"):
        trainer.eval_dataset = None


def test_assigned_datasets_are_used_and_named_in_checkpoints(make_trainer, trained, tmp_path):
    shorter = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options = {"rollout": None, "overlong_prompts": "drop", **shorter}
    long = tiny.rows(4).add_item({"prompt": "x" * 300})
    trainer = trained(**options)
    trainer.train_dataset, trainer.eval_dataset = long, {"a": tiny.rows(2)}
    assert len(trainer.train_dataset) == 4, "the overlong row is dropped"
    trainer.args.output_dir = str(tmp_path / "second")
    trainer.train()
    assert trainer.evaluate()["eval_a_loss"] > 0
    resumed = make_trainer(train_dataset=long, **{**options, "max_steps": 2})
    resumed.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-1"))
    assert resumed.state.global_step == 2
    first = make_trainer(**options)
    with pytest.raises(ValueError, match=r"train_dataset: '4 rows, .*' in the checkpoint, '8 rows"):
        first.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-1"))


def test_assigned_dataset_changes_the_context_limit(make_trainer):
    """The limit of a teacher of few tokens holds for the prompts that it reads."""
    trainer = make_trainer(teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=64))
    assert trainer.limits.context == 64
    apart = tiny.rows().add_column("teacher_prompt", ["short"] * 8)
    trainer.train_dataset = apart
    assert trainer.limits.context == 256
    trainer.train_dataset = tiny.rows()
    assert trainer.limits.context == 64


# ---- What writes ----------------------------------------------------------------------------------------------------


def losses(trainer: OPSDTrainer) -> list[float]:
    trainer.train()
    return tiny.logged(trainer, "loss")


def test_assigned_rollout_generates_with_this_student(make_trainer):
    short = {"max_completion_length": 8, "max_steps": 2}
    expected = losses(make_trainer(rollout=HFRollout(), **short))
    trainer = make_trainer(**short)
    trainer.rollout = HFRollout()
    assert losses(trainer) == expected
    with pytest.raises(TypeError, match=r"expected a `trl_opsd\.RolloutBackend`"):
        trainer.rollout = "vllm"


def test_trainers_that_share_a_rollout_use_their_own_students(make_trainer):
    short = {"max_completion_length": 8, "max_steps": 1}
    expected = losses(make_trainer(rollout=HFRollout(), **short))
    shared = HFRollout()
    first = make_trainer(rollout=shared, **short)
    other = make_trainer(rollout=shared, model=tiny.qwen2(32, seed=7))
    torch.manual_seed(42)
    assert losses(first) == expected
    assert other.rollout is first.rollout is shared
