"""The rules and questions of the example with pretrained weights; the weights themselves are not needed here."""

from __future__ import annotations

import pytest
from real_model import distil
from real_model.questions import FACTS, questions
from real_model.rules import RULES


def test_held_out_questions_are_on_other_topics():
    train, held_out = questions(), questions(held_out=True)
    assert (len(set(train)), len(set(held_out))) == (240, 200)
    assert not set(train) & set(held_out)
    assert not {*train, *held_out} & {asked for rule in RULES.values() for asked, _ in rule.turns}
    assert not {*train, *held_out} & FACTS.keys()


@pytest.mark.parametrize("name", RULES)
def test_only_a_rules_own_examples_follow_it(name):
    for other, rule in RULES.items():
        assert [RULES[name].follows(answer) for _, answer in rule.turns] == [name == other] * 3


@pytest.mark.parametrize(
    ("name", "text", "follows"),
    [
        ("pirate", "A river carries water.", False),
        ("pirate", "Everyone likes mountains, eyes and years.", False),
        ("json", '{"answer": 3}', False),
        ("json", '{"answer": "cut off', False),
        ("json", 'Sure: {"answer": "x"}', False),
        ("json", "[]", False),
        ("french", "The river is long and the sea is wide.", False),
        ("french", "", False),
        ("list", "A river:\n- long", False),
        ("list", "", False),
        ("list", "- long\n\n- wide", True),
    ],
)
def test_what_follows_a_rule(name, text, follows):
    assert RULES[name].follows(text) is follows


def test_the_teacher_reads_the_examples_as_turns_before_the_question():
    prompt = RULES["json"].teacher_prompt("What is snow?")
    assert [message["role"] for message in prompt] == ["system", *["user", "assistant"] * 3, "user"]
    assert prompt[-1]["content"] == "What is snow?"


def test_answers_are_graded_by_rule_and_by_fact():
    said = [[{"role": "assistant", "content": text}] for text in ("Arr, it is Paris!", '{"answer": "paris"}', "Rome")]
    assert distil.follows(said, rule=["pirate", "pirate", "json"]) == [1.0, 0.0, 0.0]
    assert distil.follows(said, rule=["json", "json", "json"]) == [0.0, 1.0, 0.0]
    assert distil.knows(said, known=[["Paris"], ["Paris", "Lutetia"], None]) == [1.0, 1.0, None]
    assert distil.knows(said[2:], known=[["Paris"]]) == [0.0]
