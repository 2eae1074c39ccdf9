"""The tasks of the examples: answers are right, held-out rows are others, and who sees what of a row."""

from __future__ import annotations

import random

import numpy
import pytest
from arithmetic import STUDENT, TEACHER
from arithmetic.evaluate import accuracy, answers
from arithmetic.task import Problem, draw, is_right, prompts_with_answers, right
from experts import tasks
from pictures import task as pictures
from real_model import distil
from real_model.questions import FACTS, questions
from real_model.rules import RULES
from transformers import AutoModelForCausalLM, AutoTokenizer
from two_tokenizers.task import Language
from two_tokenizers.task import prompts as beginnings

SUM = Problem(first=47, sign="+", second=85)
DIFFERENCE = Problem(first=804, sign="-", second=77)


def said(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


# ---- Arithmetic -----------------------------------------------------------------------------------------------------


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


def test_an_answer_is_right_only_if_its_last_number_is():
    assert is_right(SUM, SUM.solution)
    assert is_right(SUM, "nonsense;132")
    for wrong in ("7+5=12,4+8+1=13;133", "7+5=12,4+8+1=13;1320", "132", "7+5=12;132;", ""):
        assert not is_right(SUM, wrong)
    rows = prompts_with_answers([SUM, DIFFERENCE, SUM])
    assert right(said(SUM.solution, SUM.solution, ";132 "), rows["answer"], prompts=rows["prompt"]) == [1.0, 0.0, 1.0]


def test_training_and_held_out_problems_are_disjoint():
    train, held_out = draw(30_000, seed=1), draw(3_000, held_out=True, seed=1)
    assert not set(train) & set(held_out)
    turned = {Problem(first=p.second, sign="+", second=p.first) for p in train if p.sign == "+"}
    assert not turned & set(held_out), "a sum turned around is the same sum"


def test_teacher_is_accurate_and_student_knows_only_the_format():
    student, teacher = map(AutoModelForCausalLM.from_pretrained, (STUDENT, TEACHER))
    words, problems = AutoTokenizer.from_pretrained(STUDENT), draw(200, held_out=True)
    assert accuracy(teacher, words, problems) >= 0.9
    assert accuracy(student, words, problems) <= 0.4
    written = words.batch_decode(answers(student, words, problems), skip_special_tokens=True)
    assert sum(text.count(";") == 1 and "=" in text for text in written) >= 0.9 * len(problems)


# ---- Experts, and two tokenizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", tasks.TASKS)
def test_questions_have_one_answer_and_none_is_in_both_parts(task):
    kept, held = tasks.draw(task, 300), tasks.draw(task, 100, held_out=True)
    assert len({one.text for one in (*kept, *held)}) == 400
    solved = {
        "sums": lambda text, answer: eval(text[:-1]) == int(answer.rpartition(";")[2]),
        "sorting": lambda text, answer: sorted(text[:-1].split(",")) == answer.split(","),
        "twice": lambda text, answer: [digit for digit in set(text) - {"-"} if text.count(digit) == 2] == [answer],
    }[task]
    assert all(solved(one.text, one.answer) for one in kept)
    written, expected = said(*(one.answer for one in kept)), tasks.rows(kept)["answer"]
    assert set(tasks.right(written, expected)) == {1.0}
    random.Random(0).shuffle(written)
    assert sum(tasks.right(written, expected)) < 100


def test_sentences_are_of_the_language_and_noise_is_not():
    language = Language()
    texts = language.sentences(1, 200)
    assert texts == Language().sentences(1, 200) != language.sentences(2, 200)
    good, pairs = map(sum, zip(*map(language.right, texts), strict=True))
    assert good == pairs > 1000
    good, pairs = map(sum, zip(*map(language.right, Language(0.7).sentences(1, 200)), strict=True))
    assert 0.25 < good / pairs < 0.4
    assert all(one.split(" ")[0] in language.words for one in beginnings(language, 3, 50)["prompt"])


# ---- Pictures -------------------------------------------------------------------------------------------------------


def test_only_the_crop_shows_the_digit():
    for scene in pictures.draw_scenes(50):
        pixels = numpy.asarray(scene.whole).mean(-1)
        x, y = scene.corner
        inside = numpy.asarray(scene.crop).mean(-1)
        assert (inside == pixels[y : y + pictures.CELL, x : x + pictures.CELL]).all()
        assert (inside < 80).sum() > 15
        pixels[y : y + pictures.CELL, x : x + pictures.CELL] = 255
        assert pixels.min() > 80


def test_only_the_teacher_sees_the_crop():
    scene = pictures.Scene(7)
    ((whole, crop),) = ((row["images"], row["teacher_images"]) for row in pictures.rows([scene], to_teacher="crop"))
    assert [image.tobytes() for image in (*whole, *crop)] == [scene.whole.tobytes(), scene.crop.tobytes()]
    assert set(pictures.rows([scene], "crop").column_names) == {"prompt", "images", "answer"}
    assert pictures.right(said("2", "3", "22", ""), answer=["2"] * 4, prompts=None) == [1.0, 0.0, 0.0, 0.0]


# ---- Rules for a real model -----------------------------------------------------------------------------------------


def test_held_out_questions_are_on_other_topics():
    train, held_out = questions(), questions(held_out=True)
    assert (len(set(train)), len(set(held_out))) == (240, 200)
    assert not set(train) & set(held_out)
    assert not {*train, *held_out} & {*FACTS, *(asked for rule in RULES.values() for asked, _ in rule.turns)}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("pirate", ["A river carries water.", "Everyone likes mountains, eyes and years."]),
        ("json", ['{"answer": 3}', '{"answer": "cut off', 'Sure: {"answer": "x"}', "[]"]),
        ("french", ["The river is long and the sea is wide.", ""]),
        ("list", ["A river:\n- long", ""]),
    ],
)
def test_only_a_rules_own_examples_follow_it(name, others):
    for of, rule in RULES.items():
        assert [RULES[name].follows(answer) for _, answer in rule.turns] == [name == of] * 3
    assert not any(map(RULES[name].follows, others))


def test_teacher_reads_examples_as_turns_and_answers_are_graded_by_rule_and_fact():
    prompt = RULES["json"].teacher_prompt("What is snow?")
    assert [message["role"] for message in prompt] == ["system", *["user", "assistant"] * 3, "user"]
    assert prompt[-1]["content"] == "What is snow?"
    texts = said("Arr, it is Paris!", '{"answer": "paris"}', "Rome")
    assert distil.follows(texts, rule=["pirate", "pirate", "json"]) == [1.0, 0.0, 0.0]
    assert distil.knows(texts, known=[["Paris"], ["Paris", "Lutetia"], None]) == [1.0, 1.0, None]
    assert distil.knows(texts[2:], known=[["Paris"]]) == [0.0]
