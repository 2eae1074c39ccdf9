"""The doors: what opens them, walks, grading, the tokenizer, and what is learned of a walk."""

from __future__ import annotations

import random
import re

import pytest
from agents import TASKS, encoded
from doors.tokenizer import make_tokenizer
from doors.world import LEVELS, Doors, Maze, draw, of_mazes, right_door

TASK, MAZE = TASKS["doors"], Maze(number="0042", rooms=2)


def walked(kind, count=300, seed=0):
    """Walks through mazes, as maze and calls."""
    source = random.Random(seed)
    for maze, row in zip(draw(count), TASK.world.rows(count), strict=True):
        walk = TASK.walk(row, kind, source)
        calls = [one["tool_calls"][0]["function"] for one in walk.messages if one.get("tool_calls")]
        yield maze, [(call["arguments"]["room"], call["arguments"]["door"]) for call in calls], walk


def is_left(maze, calls):
    world = Doors()
    world.reset(maze.number, maze.rooms)
    for room, door in calls:
        world.try_door(maze.number, room, door)
    return world.get_reward()


def test_training_and_held_out_mazes_are_disjoint_and_reproducible():
    train, held_out = draw(7500), [maze for rooms in LEVELS for maze in draw(500, [rooms], True)]
    assert not {maze.number for maze in train} & {maze.number for maze in held_out}
    assert {maze.rooms for maze in train} == set(LEVELS)
    assert draw(20) == draw(20) != draw(20, seed=1)
    with pytest.raises(ValueError, match="got 9999"):
        draw(9999)


def test_only_right_calls_after_mistakes_are_labels():
    mistakes = 0
    for maze, calls, walk in walked("mistaken"):
        room = 1
        for (where, door), is_advised in zip(calls, walk.is_advised, strict=False):
            if is_advised:
                assert (where, door) == (room, right_door(maze.number, room))
            mistakes += not is_advised
            room += where == room and door == right_door(maze.number, room)
        assert room == maze.rooms + 1
        assert walk.is_advised[-1]
    assert mistakes > 200


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        ([(1, 1), (2, 1)], True),
        ([(1, 2), (1, 1), (2, 2), (2, 1)], True),
        ([(1, 2), (1, 2), (1, 1), (2, 2), (2, 1)], False),  # more than there are doors
        ([(2, 1), (1, 1)], False),  # a room that was not reached
        ([(2, 1), (1, 1), (2, 1)], True),
        ([(1, 1), (2, 1), (3, right_door("0042", 3)), (1, 1), (1, 1)], True),  # out is out
        ([(1, 1)], False),
        ([], False),
    ],
)
def test_maze_is_left_by_opening_its_rooms_in_turn(calls, left):
    assert MAZE.doors == [1, 1]
    assert is_left(MAZE, calls) == left


def test_only_the_teacher_reads_the_doors():
    (row,) = of_mazes([MAZE])
    assert row == {"prompt": [{"role": "user", "content": "maze 0042, 2 rooms"}], "maze": "0042", "rooms": 2}
    told = [{"role": "user", "content": "maze 0042, 2 rooms\n\ndoors 1 1"}]
    assert TASK.question(Doors(), row, is_told=True) == told
    assert TASK.question(Doors(), row, is_told=False) == row["prompt"]


def test_labels_are_of_advised_calls_and_the_last_message():
    words, whole = make_tokenizer(), 0
    for maze, calls, walk in walked("mistaken", count=40):
        ids, labels = encoded(words, walk)
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        learned = words.decode([label for label in labels if label != -100])
        doors = [tuple(map(int, one)) for one in re.findall(r'"room": (\d), "door": (\d)', learned)]
        assert doors == [call for call, is_advised in zip(calls, walk.is_advised, strict=False) if is_advised]
        assert len(doors) >= maze.rooms - walk.is_advised.count(False)
        assert learned.endswith("out<|end|>")
        assert "open" not in learned
        whole += all(walk.is_advised)
    assert 0 < whole < 40
