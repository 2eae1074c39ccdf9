"""`rollout/kl_sampler` is the mean over the tokens whose sampler is known, and over no others."""

from __future__ import annotations

import pytest
from support import tiny
from support.measured_sampler import Measured, Told
from support.mirror_engine import Mirrored

from trl_opsd.rollout.synced import EVERY

NAME = "rollout/kl_sampler"
long = pytest.mark.long


def trained(make_trainer, told=None, **given):
    """A trainer that was trained and evaluated in turn, whose rollout knows what all tokens were drawn with."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": tiny.rows(2)}
    rollout = Told(tiny.recorded(tiny.tokenizer()))
    trainer = make_trainer(cls=Measured, rollout=rollout, **{**options, **evaluates, **given})
    trainer.told = told or trainer.told
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": "ahead"},
        pytest.param(
            {"cross_tokenizer": "bytes", "teacher_processing_class": tiny.tokenizer()}, id="bytes", marks=long
        ),
        pytest.param({"padding_free": True, "max_tokens_per_microbatch": 90}, marks=long),
        pytest.param({"num_generations": 2}, marks=long),
        pytest.param({"overlap": "step"}, marks=long),
        pytest.param({"divergence": "sampled_reverse_kl", "eval_strategy": "no"}, marks=long),
    ],
    ids=str,
)
def test_distance_of_the_sampler_equals_the_float64_figure(make_trainer, options):
    trainer = trained(make_trainer, **options)
    assert tiny.logged(trainer, NAME) == pytest.approx([trainer.mean(step) for step in range(3)], rel=1e-4)
    if "eval_strategy" not in options:
        trainer.of_step.clear()
        found = trainer.evaluate()
        assert found[f"eval_{NAME}"] == pytest.approx(trainer.mean("eval"), rel=1e-4)


def test_completions_of_the_dataset_are_left_out(make_trainer):
    rows = tiny.rows().add_column("completion", ["so"] * 8)
    given = tiny.tokenizer()("so")["input_ids"]

    def told(prompt, ids):
        return None if ids[: len(given)] == given else Told.logprobs(None, prompt, ids)

    options = {"train_dataset": rows, "lmbda": 0.5, "per_device_train_batch_size": 4, "eval_strategy": "no"}
    trainer = trained(make_trainer, told, **options)
    assert tiny.logged(trainer, NAME) == pytest.approx([trainer.mean(step) for step in range(3)], rel=1e-4)
    assert sum(tiny.logged(trainer, "tokens/dataset")) > 2


@pytest.mark.filterwarnings("ignore")
def test_a_sampler_that_differs_by_an_option_is_not_measured(make_trainer):
    for options, in_training, in_evaluation in [
        ({}, True, True),
        ({"temperature": 0.5}, False, False),
        ({"student_temperature": 0.5}, False, False),
        ({"generation_kwargs": {"temperature": 0.5}}, False, False),
        ({"generation_kwargs": {"max_new_tokens": 5}}, True, True),
        ({"top_p": 0.9}, False, False),
        ({"eval_temperature": 0.0}, True, False),
        ({"divergence": "sampled_reverse_kl"}, True, False),
    ]:
        trainer = make_trainer(rollout=Told({}), **options)
        trainer.model.train()
        assert trainer.reads_logprobs is in_training, options
        trainer.model.eval()
        assert trainer.reads_logprobs is in_evaluation, options


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled_reverse_kl"])
def test_engines_are_asked_of_one_row_in_16(make_trainer, tmp_path, divergence):
    trainer = make_trainer(rollout=Mirrored(tiny.config(tmp_path)), divergence=divergence)
    prompts, every = [[5, number + 1] for number in range(2 * EVERY)], 1 if divergence.startswith("s") else EVERY
    asked = [number for number, one in enumerate(trainer.rollout._prepared(prompts)) if "logprobs" in one]
    assert asked == [*range(0, len(prompts), every)]
    (ids,) = trainer.rollout.complete(prompts[:1], 0)
    trainer.model.eval()
    for _ in range(3):  # evaluations between the rows of a step and their loss
        trainer.rollout.complete(prompts[1:2], 0)
    trainer.model.train()
    assert len(trainer.rollout.logprobs(prompts[0], ids)) == len(ids)
