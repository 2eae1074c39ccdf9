"""Worlds of agents: walks through them end well, nobody can know them, and their models read all of it."""

from __future__ import annotations

import random

import agents
import pytest
from agents import TASKS, encoded
from house.world import House


@pytest.mark.parametrize("kind", ["straight", "searched", "mistaken"])
@pytest.mark.parametrize("name", TASKS)
def test_walks_end_well_and_fit(name, kind):
    task, source, ends = TASKS[name], random.Random(0), []
    words, made = task.tokenizer(), task.environment

    class Kept(made):
        def __init__(self):
            ends.append(self)

    task = agents.Task(environment=Kept, world=task.world)
    rows = list(task.world.rows(200))
    walks = [task.walk(row, kind, source) for row in rows]
    assert len(ends) == 200
    if kind == "mistaken":
        assert any(not one for walk in walks for one in walk.is_advised)
    else:
        assert [end.get_reward() for end in ends] == [1.0] * 200
        assert all(all(walk.is_advised) for walk in walks)
        assert max(len(walk.is_advised) - 1 for walk in walks) <= task.world.MOST_CALLS
    for row, walk in zip(rows, walks, strict=True):
        assert len(walk.is_advised) == sum(one["role"] == "assistant" for one in walk.messages)
        ids, labels = encoded(words, walk)
        asked = words.apply_chat_template(walk.messages[:1], add_generation_prompt=True)["input_ids"]
        assert ids[: len(asked)] == asked
        assert len(ids) - len(asked) <= task.world.MOST_TOKENS
        assert words.unk_token_id not in ids
        assert set(labels[: len(asked)]) == {-100}
        told = task.question(made(), row, is_told=True)
        assert told[0]["content"].startswith(walk.messages[0]["content"])
        assert words.unk_token_id not in words.apply_chat_template(told)["input_ids"]


@pytest.mark.parametrize("name", TASKS)
def test_held_out_rows_are_others_and_levels_come_in_turn(name):
    world = TASKS[name].world
    (column,) = {"maze", "seed"} & set(world.rows(1).column_names)
    drawn = [
        set(world.rows(400, held_out=held_out, seed=seed)[column]) for held_out in (False, True) for seed in (0, 1)
    ]
    assert not (drawn[0] | drawn[1]) & (drawn[2] | drawn[3])
    assert drawn[0] != drawn[1]
    assert set(world.rows(100)[{"doors": "rooms"}.get(name, world.OF)]) == set(world.LEVELS)


def test_teacher_learns_to_continue_wrong_calls_not_begin_them():
    task, source, seen = TASKS["sql"], random.Random(0), set()
    words = task.tokenizer()
    for row in task.world.rows(60):
        walk = task.walk(row, "mistaken", source, is_told=True)
        ids, labels = encoded(words, walk)
        pieces = words.batch_decode([[one] for one in ids])
        begins = [place + 1 for place, piece in enumerate(pieces) if piece == "<|assistant|>"]
        ends = [pieces.index("<|end|>", place) for place in begins]
        for place, end, is_advised in zip(begins, ends, walk.is_advised, strict=True):
            learned = [one != -100 for one in labels[place : end + 1]]
            assert learned == [is_advised or (is_advised is None and at >= 2) for at in range(len(learned))]
            assert is_advised is not None or pieces[place + 1].startswith('{"name": "submit"')
            seen.add(is_advised)
    assert seen == {True, None, False}


def test_a_chest_is_opened_with_the_key_alone():
    house = House()
    assert house.reset(seed=0, rooms=3) == f"The rooms are {', '.join(house.rooms)}. Open the chest."
    assert house.take() == "You have nothing."
    assert house.open() == "There is no chest."
    assert house.go(house.of_chest) == f"{house.of_chest}: a chest."
    assert (house.open(), house.get_reward()) == ("The chest is locked.", 0.0)
    assert house.go(house.of_key) == f"{house.of_key}: a key."
    assert house.take() == "You have the key."
    assert house.go(house.of_key) == f"{house.of_key}: nothing."
    with pytest.raises(ValueError, match="no hall"):
        house.go("hall")
    house.go(house.of_chest)
    assert (house.open(), house.get_reward()) == ("The chest is open.", 1.0)
