"""A teacher known by some tokens meets overlap, evaluation, the report, resuming and other teachers."""

from __future__ import annotations

from typing import Any

import pytest
from support import serving, tiny
from support.failing_server import Pretended, Scoring, pretended
from support.rollouts import Apart
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDTrainer

pytestmark = pytest.mark.long


def trainer(folder: Any, teacher: Any, rows: Any = None, rollout: Any = None, **given: Any) -> OPSDTrainer:
    return OPSDTrainer(
        model=tiny.qwen2(32),
        teacher_model=teacher,
        args=tiny.config(folder, **{"max_steps": 3, **given}),
        train_dataset=rows or tiny.rows(),
        eval_dataset=rows or tiny.rows(),
        processing_class=tiny.tokenizer(),
        rollout=rollout,
    )


@pytest.mark.parametrize("targets", ["student_top_k", "teacher_top_k"])
def test_overlap_evaluation_and_report_change_no_loss(checkpoint, tmp_path, targets):
    found = []
    with pretended(checkpoint[1], kind=Scoring, words=tiny.tokenizer()) as server:
        asked = {"teacher_server_targets": targets, "teacher_server_top_k": 6, "divergence": "jsd", "beta": 0.5}
        for overlap in (None, "step", "ahead"):
            given = {"overlap": overlap, "eval_strategy": "steps", "eval_steps": 1, "report": True, **asked}
            rollout = Apart(tiny.recorded(tiny.tokenizer()))
            folder = tmp_path / str(overlap)
            made = trainer(folder, checkpoint[0], rollout=rollout, teacher_server_url=server.url, **given)
            made.train()
            evaluated = [row["eval_loss"] for row in made.state.log_history if "eval_loss" in row]
            found.append([*tiny.logged(made, "loss"), *evaluated])
            assert (folder / "report.html").exists()
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_other_targets_are_another_objective_to_a_resume(checkpoint, tmp_path):
    with pretended(checkpoint[1], kind=Scoring, words=tiny.tokenizer()) as server:
        given = {"save_strategy": "steps", "save_steps": 1, "teacher_server_url": server.url}
        given |= {"teacher_server_top_k": 6, "teacher_server_targets": "student_top_k"}
        trainer(tmp_path, checkpoint[0], **given).train()
        trainer(tmp_path, checkpoint[0], **{**given, "max_steps": 4}).train(resume_from_checkpoint=True)
        for other in ({"teacher_server_top_k": 7}, {"teacher_server_targets": "teacher_top_k"}):
            with pytest.raises(ValueError, match="teachers: "):
                trainer(tmp_path, checkpoint[0], **{**given, **other}).train(resume_from_checkpoint=True)


def test_teachers_behind_either_server_and_here_teach_together(checkpoint, tmp_path):
    """The first tells all of its tokens, the second states, the third is here; all are told more than the student."""
    other = serving.save_teacher(tmp_path / "other", seed=2)
    rows = tiny.rows().add_column("teacher", ["a", "b", "c", "a"] * 2)
    rows = rows.add_column("privileged_context", [f"hint {number}" for number in range(8)])
    losses = []
    with (
        pretended(checkpoint[1], kind=Scoring, words=tiny.tokenizer(), most=400) as one,
        pretended(AutoModelForCausalLM.from_pretrained(other), kind=Pretended) as two,
    ):
        for urls in (None, {"a": one.url, "b": two.url}):
            given: dict[str, Any] = {"teacher_prompt_template": "{privileged_context} {prompt}", "max_steps": 2}
            if urls is not None:
                given |= {"teacher_server_url": urls, "teacher_server_top_k": tiny.VOCABULARY}
            teachers = {"a": checkpoint[0], "b": other, "c": tiny.llama(64, seed=2)}
            made = trainer(tmp_path / str(urls is None), teachers, rows, divergence="forward_kl", **given)
            made.train()
            losses.append(tiny.logged(made, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
