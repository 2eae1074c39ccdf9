"""The built-in task: right answers, held-out problems, the tokenizer, and the shipped models."""

from __future__ import annotations

import pytest
from arithmetic import STUDENT, TEACHER, make_models
from arithmetic.evaluate import MAX_COMPLETION, accuracy, answers
from arithmetic.task import Problem, draw, is_right, prompts, prompts_with_answers, prompts_with_solutions, right
from arithmetic.tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

SUM = Problem(first=47, sign="+", second=85)
DIFFERENCE = Problem(first=804, sign="-", second=77)


@pytest.fixture(scope="module")
def shipped():
    return {
        name: AutoModelForCausalLM.from_pretrained(path) for name, path in (("student", STUDENT), ("teacher", TEACHER))
    }


@pytest.mark.parametrize(
    ("problem", "solution"),
    [
        (SUM, "7+5=12,4+8+1=13;132"),
        (DIFFERENCE, "14-7=7,10-7-1=2,8-0-1=7;727"),
        (Problem(first=999, sign="+", second=10), "9+0=9,9+1=10,9+0+1=10;1009"),
        (Problem(first=35, sign="-", second=35), "5-5=0,3-3=0;0"),
    ],
)
def test_worked_solutions_carry_and_borrow_correctly(problem, solution):
    assert problem.solution == solution


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (SUM.solution, True),
        ("nonsense;132", True),
        ("7+5=12,4+8+1=13;133", False),
        ("7+5=12,4+8+1=13;1320", False),
        ("132", False),
        ("7+5=12;132;", False),
        ("", False),
    ],
)
def test_an_answer_is_right_only_if_its_last_number_is(completion, right):
    assert is_right(SUM, completion) is right


def test_the_reward_is_1_for_a_right_answer():
    rows = prompts_with_answers([SUM, DIFFERENCE, SUM])
    assert rows["answer"] == [132, 727, 132]
    texts = [[{"role": "assistant", "content": text}] for text in (SUM.solution, SUM.solution, ";132 ")]
    assert right(texts, rows["answer"], prompts=rows["prompt"]) == [1.0, 0.0, 1.0]


def test_training_and_held_out_problems_are_disjoint():
    train, held_out = draw(30_000, seed=1), draw(3_000, held_out=True, seed=1)
    assert not set(train) & set(held_out)
    turned = {Problem(first=p.second, sign="+", second=p.first) for p in train if p.sign == "+"}
    assert not turned & set(held_out), "a sum turned around is the same sum"
    assert not any(problem.is_held_out for problem in train)


def test_the_dataset_shows_answers_only_to_the_teacher():
    question = {"prompt": [{"role": "user", "content": "47+85="}]}
    assert prompts([SUM])[0] == question
    assert prompts_with_solutions([SUM])[0] == {**question, "privileged_context": "7+5=12,4+8+1=13;132"}
    assert SUM.prompt_with_solution == [{"role": "user", "content": "47+85=7+5=12,4+8+1=13;132"}]


def test_every_solution_survives_the_tokenizer_and_fits():
    tokenizer = make_tokenizer()
    for problem in draw(500):
        ids = tokenizer(problem.solution)["input_ids"]
        assert tokenizer.decode(ids) == problem.solution
        assert len(ids) == len(problem.solution) < MAX_COMPLETION
        assert tokenizer.pad_token_id not in ids, "a character is missing"


def test_teacher_is_accurate_and_student_knows_only_the_format(shipped):
    words, problems = AutoTokenizer.from_pretrained(STUDENT), draw(200, held_out=True)
    assert accuracy(shipped["teacher"], words, problems) >= 0.9
    assert accuracy(shipped["student"], words, problems) <= 0.4
    written = words.batch_decode(answers(shipped["student"], words, problems), skip_special_tokens=True)
    assert sum(text.count(";") == 1 and "=" in text for text in written) >= 0.9 * len(problems)


@pytest.mark.long
def test_script_that_made_the_models_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_models.py", "student", "--steps", "2", "--output", str(tmp_path)])
    make_models.main()
    made, shipped = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "student", STUDENT))
    assert made.num_parameters() == shipped.num_parameters()
