"""What users write: the examples of docs/extending.md run unchanged, and files to copy do what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from divergences import AdaptiveKL, AlphaDivergence, EntropyAwareKL
from support import tiny
from visits import Visits

from trl_opsd import FrozenTeacher, Teacher
from trl_opsd.losses import ForwardKL, ReverseKL
from trl_opsd.losses.validation import prove_divergence
from trl_opsd.teacher import Resident

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
EXAMPLES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))
EXAMPLES |= {
    name: "from trl_opsd import Method, OPSDTrainer\n" + next(one for one in BLOCKS if f"class {name}" in one)
    for name in ("SkipSolved", "HintOnFailure")
}
SOLVED = {"2+2=", "a"}
"""Prompts whose completions are all right, by the reward function of these tests."""


@pytest.fixture
def run(tmp_path):
    def run(name, resume=None, given=None, **options):
        options = {"max_steps": 2, "learning_rate": 1e-2, "max_completion_length": 8, **options}
        names = {
            "student": tiny.qwen2(32, seed=0),
            "teacher": tiny.qwen2(48, seed=1),
            "tokenizer": tiny.tokenizer(),
            "dataset": tiny.rows(),
            "args": tiny.config(tmp_path / "out", **options),
            **(given or {}),
        }
        exec(EXAMPLES[name], names)
        trainer = names["trainer"]
        before = tiny.weights(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert not torch.equal(before, tiny.weights(trainer))
        return trainer

    return run


@pytest.mark.quick
@pytest.mark.parametrize(("name", "base"), [("A method", 1.02), ("Weights", 0.9)])
def test_custom_weights_are_applied(run, name, base):
    trainer = run(name)
    batch = trainer.score([{"prompt": "2+2="}])
    expected = [base**place for place in range(int(batch.rollout.completion_mask.sum()))]
    assert batch.rollout.weights[0, : len(expected)].tolist() == pytest.approx(expected)
    assert name == "Weights" or all("late/tokens" in one for one in trainer.state.log_history if "loss" in one)


def test_solved_prompts_are_skipped_also_after_a_resume(run, tmp_path):
    asked = []

    def right(prompts, **_):
        asked.extend(prompts)
        return [float(prompt in SOLVED) for prompt in prompts]

    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "num_generations": 2}
    options |= {"per_device_train_batch_size": 4}  # two prompts per step, all eight in four steps
    run("SkipSolved", given={"right": right}, **options)
    twice = dict.fromkeys(set(tiny.PROMPTS) - SOLVED, 4)
    assert Counter(asked) == {**twice, **dict.fromkeys(SOLVED, 2)}
    asked.clear()
    run("SkipSolved", resume=str(tmp_path / "out" / "checkpoint-4"), given={"right": right}, **options)
    assert Counter(asked) == dict.fromkeys(twice, 2)


def test_only_teachers_of_failures_read_the_hint(run):
    class Reading(Teacher):
        """Keeps the texts that another teacher reads before completions."""

        head = property(lambda self: self.inner.head)
        context = property(lambda self: self.inner.context)

        def __init__(self):
            model = tiny.qwen2(48, seed=1)
            self.inner, self.texts = FrozenTeacher(Resident(model, model.device)), set()

        def targets(self, rollout):
            self.texts.update(map(tiny.tokenizer().decode, rollout.prompt_lists()))
            return self.inner.targets(rollout)

    def chat(text):
        return [{"role": "user", "content": text}]

    def right(prompts, **_):
        return [float(prompt[-1]["content"] in SOLVED) for prompt in prompts]

    rows = Dataset.from_list([{"prompt": chat(one), "hint": f"{one}?"} for one in tiny.PROMPTS])
    teacher = Reading()
    run("HintOnFailure", given={"right": right, "dataset": rows, "teacher": teacher}, max_steps=4)
    hints = {one: [] if one in SOLVED else [{"role": "system", "content": f"{one}?"}] for one in tiny.PROMPTS}
    expected = [[*hint, *chat(one)] for one, hint in hints.items()]
    texts = tiny.tokenizer().apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert teacher.texts == set(texts)


@pytest.mark.quick
def test_a_custom_divergence_is_minimised_and_recorded_in_checkpoints(run):
    trainer = run("A divergence", save_strategy="steps", save_steps=2)
    assert repr(trainer.divergence) == "SkewedReverseKL(skew=0.1)"
    written = Path(trainer.args.output_dir, "checkpoint-2", "opsd_fingerprint.json").read_text()
    assert json.loads(written)["divergence"] == "SkewedReverseKL(skew=0.1)"
    with_it = tiny.config(trainer.args.output_dir, divergence=trainer.divergence)
    assert with_it.build_divergence() is trainer.divergence
    assert json.loads(with_it.to_json_string())["divergence"] == "SkewedReverseKL(skew=0.1)"


def test_custom_teacher_is_called_once_per_batch_and_custom_rollout_writes_completions(run):
    assert run("A teacher").teacher.batches == 2 + 1, "and examined once"
    trainer = run("A rollout")
    assert max(map(len, trainer.complete(trainer.tokenize(tiny.PROMPTS)))) <= 8


# ---- To copy: `examples/divergences.py` and `examples/methods`, which `equivalence/test_pairs.py` has too ------------


STUDENT, TEACHER = torch.tensor(
    [[[0.1, 0.2, 0.3, 0.4], [0.25] * 4], [[0.5, 0.25, 0.15, 0.1], [0.94, 0.02, 0.02, 0.02]]], dtype=torch.float64
)
FORWARD, REVERSE = (one.value(STUDENT.log(), TEACHER.log()) for one in (ForwardKL(), ReverseKL()))
SHARES = torch.tensor([0.4 / 0.9, 0.69 / 1.38], dtype=torch.float64)
"""Of the teacher's likeliest token, which alone is the head, in all differences."""


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (EntropyAwareKL(), REVERSE + FORWARD * torch.tensor([1.0, 0.0])),
        (AdaptiveKL(), SHARES * FORWARD + (1 - SHARES) * REVERSE),
        (AlphaDivergence(), 2 * (STUDENT.sqrt() - TEACHER.sqrt()).square().sum(-1)),
    ],
    ids=str,
)
def test_values_are_those_of_the_paper_and_training_takes_them(trained, divergence, expected):
    torch.testing.assert_close(divergence.value(STUDENT.log(), TEACHER.log()), expected)
    assert prove_divergence(divergence, 50, torch.device("cpu")) == []
    trainer = trained(divergence=divergence, max_steps=1)
    assert 0 < tiny.logged(trainer, "loss")[0] < 20


@pytest.mark.parametrize(("alpha", "expected"), [(1e-6, REVERSE), (1 - 1e-6, FORWARD)])
def test_alpha_is_between_both_directions(alpha, expected):
    torch.testing.assert_close(AlphaDivergence(alpha).value(STUDENT.log(), TEACHER.log()), expected, rtol=0, atol=1e-5)


SKIPPED = {tiny.PROMPTS[0], tiny.PROMPTS[3]}


class SkipSecond(Visits):
    """Skips two prompts at their second visit."""

    def weight(self, row, last):
        return float(last is None or row["prompt"] not in SKIPPED)


def test_skipped_prompts_cost_nothing_and_a_resume_remembers_them(trained, tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "shuffle_dataset": False}  # two steps are an epoch
    options |= {"save_strategy": "steps", "save_steps": 3}
    whole = trained(**options, methods=[SkipSecond()])
    resumed = trained(**options, methods=[SkipSecond()], resume=str(tmp_path / "checkpoint-3"))
    lengths = dict(zip(tiny.PROMPTS, map(len, tiny.tokenizer()(tiny.ANSWERS)["input_ids"]), strict=True))
    saved = sum(lengths[one] for one in SKIPPED)
    assert tiny.logged(whole, "prompts/skipped") == tiny.logged(resumed, "prompts/skipped") == [0, 0, 0.5, 0]
    assert tiny.logged(resumed, "prompts/tokens_saved_total")[-1] == saved
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))
    tokens = [lengths[one] for one in tiny.PROMPTS[:4] if one not in SKIPPED]
    assert tiny.logged(whole, "completions/mean_length")[2] == pytest.approx(sum(tokens) / len(tokens))
