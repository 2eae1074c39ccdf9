"""The example of three experts: its tasks, and its table from start to end with models that have learned nothing."""

from __future__ import annotations

import random

import merge_experts
import pytest
from experts import make
from experts.tasks import TASKS, draw, right, rows


@pytest.mark.parametrize("task", TASKS)
def test_questions_have_one_answer_and_none_is_in_both_parts(task):
    kept, held = draw(task, 300), draw(task, 100, held_out=True)
    assert len({one.text for one in (*kept, *held)}) == 400
    solved = {
        "sums": lambda text, answer: eval(text[:-1]) == int(answer.rpartition(";")[2]),
        "sorting": lambda text, answer: sorted(text[:-1].split(",")) == answer.split(","),
        "twice": lambda text, answer: [digit for digit in set(text) - {"-"} if text.count(digit) == 2] == [answer],
    }[task]
    assert all(solved(one.text, one.answer) for one in kept)
    said = [[{"role": "assistant", "content": one.answer}] for one in kept]
    assert set(right(said, rows(kept)["answer"])) == {1.0}
    random.Random(0).shuffle(said)
    assert sum(right(said, rows(kept)["answer"])) < 100


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_way_has_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "STEPS", dict.fromkeys(make.STEPS, 3))
    monkeypatch.setattr(make, "ROWS", 100)
    merge_experts.main(["--output", str(tmp_path), "--steps", "2", "--seeds", "0", "--held_out", "4", "--controls"])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("|")[1].strip() for line in lines[-len(merge_experts.WAYS) - 6 :]]
    assert {"expert of sums", "student before", "average of the weights"} <= set(names)
    assert all(any(way in name for name in names) for way in merge_experts.WAYS)
