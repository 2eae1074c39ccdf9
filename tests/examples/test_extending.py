"""The examples of docs/extending.md run unchanged and do what the page says."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from support import tiny

from trl_opsd import FrozenTeacher, Teacher
from trl_opsd.teacher import Resident

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
IMPORTS = "from trl_opsd import Method, OPSDTrainer\n"
EXAMPLES |= {
    name: IMPORTS + next(one for one in BLOCKS if f"class {name}" in one) for name in ("SkipSolved", "HintOnFailure")
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
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.train(resume_from_checkpoint=resume)
        assert any(not torch.equal(was, now) for was, now in zip(before, trainer.model.parameters(), strict=True))
        return trainer

    return run


def test_the_page_has_the_examples_this_file_runs():
    with_headings = {"A method", "A divergence", "Weights", "A teacher", "A rollout"}
    assert set(EXAMPLES) == {*with_headings, "SkipSolved", "HintOnFailure"}
    assert len(BLOCKS) == len(EXAMPLES)


def test_a_custom_method_weighs_tokens(run):
    trainer = run("A method")
    batch = trainer.score([{"prompt": "2+2="}])
    expected = [1.02**place for place in range(int(batch.rollout.completion_mask.sum()))]
    assert batch.rollout.weights[0, : len(expected)].tolist() == pytest.approx(expected)
    assert all("late/tokens" in one for one in trainer.state.log_history if "loss" in one)


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
    checkpoint = tmp_path / "out" / "checkpoint-4"
    assert json.loads((checkpoint / "opsd_method_SkipSolved.json").read_text()) == {"solved": sorted(SOLVED)}
    asked.clear()
    run("SkipSolved", resume=str(checkpoint), given={"right": right}, **options)
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
            self.texts.update(tiny.tokenizer().batch_decode([ids[ids != 0] for ids in rollout.prompt_ids]))
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


@pytest.mark.quick
def test_custom_weights_are_applied(run):
    trainer = run("Weights")
    batch = trainer.score([{"prompt": "2+2="}])
    expected = [0.9**place for place in range(int(batch.rollout.completion_mask.sum()))]
    assert batch.rollout.weights[0, : len(expected)].tolist() == pytest.approx(expected)


def test_custom_teacher_is_called_once_per_batch_and_examined_once(run):
    assert run("A teacher").teacher.batches == 2 + 1


def test_a_custom_rollout_writes_completions(run):
    trainer = run("A rollout")
    lengths = {len(ids) for ids in trainer.complete(trainer.tokenize(tiny.PROMPTS))}
    assert max(lengths) <= 8
