"""The examples of docs/extending.md run unchanged and do what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support import tiny

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))
TOLD = next(one for one in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "class Told" in one)


@pytest.fixture
def run(tmp_path):
    def run(name, **options):
        names = {
            "student": tiny.qwen2(32, seed=0),
            "teacher": tiny.qwen2(48, seed=1),
            "tokenizer": tiny.tokenizer(),
            "dataset": tiny.rows(),
            "args": tiny.config(tmp_path / "out", max_steps=2, learning_rate=1e-2, max_completion_length=8, **options),
        }
        exec(EXAMPLES[name], names)
        trainer = names["trainer"]
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.train()
        assert any(not torch.equal(was, now) for was, now in zip(before, trainer.model.parameters(), strict=True))
        return trainer

    return run


def test_the_page_has_the_examples_this_file_runs():
    assert set(EXAMPLES) == {"A method", "A divergence", "Weights", "A teacher", "A rollout"}


def test_a_custom_method_weighs_tokens(run):
    trainer = run("A method")
    batch = trainer._generate_and_score_completions([{"prompt": "2+2="}])
    expected = [1.02**place for place in range(int(batch["completion_mask"].sum()))]
    assert batch["loss_weights"][0, : len(expected)].tolist() == pytest.approx(expected)
    assert all("late/tokens" in one for one in trainer.state.log_history if "loss" in one)


def test_a_custom_method_tells_the_teacher_and_keeps_its_state(run, monkeypatch):
    monkeypatch.setitem(EXAMPLES, "told", f"from trl_opsd import Method, OPSDTrainer\n{TOLD}")
    trainer = run("told", save_strategy="steps", save_steps=2)
    assert trainer.teaching.first_made is None
    read = trainer.teaching.prompts.own(trainer.teaching.read_rows([{"prompt": "2+2="}]), [[5]])
    assert [one.value for one in read] == ["2+2= (attempt in step 2)"]
    written = Path(trainer.args.output_dir, "checkpoint-2", "opsd_method_Told.json").read_text()
    assert json.loads(written) == {"steps": 2}


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
    batch = trainer._generate_and_score_completions([{"prompt": "2+2="}])
    expected = [0.9**place for place in range(int(batch["completion_mask"].sum()))]
    assert batch["loss_weights"][0, : len(expected)].tolist() == pytest.approx(expected)


def test_custom_teacher_is_called_once_per_batch_and_examined_once(run):
    assert run("A teacher").teacher.batches == 2 + 1


def test_a_custom_rollout_writes_completions(run):
    trainer = run("A rollout")
    lengths = {len(ids) for ids in trainer.complete(trainer.tokenize(tiny.PROMPTS))}
    assert max(lengths) <= 8
