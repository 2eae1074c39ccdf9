"""The doors: what opens them, walks, grading, the tokenizer, and what is learned of a walk."""

from __future__ import annotations

import random
import re

import pytest
from doors import GUIDE, STUDENT, TEACHER
from doors.make_models import encoded
from doors.tokenizer import make_tokenizer
from doors.world import DOORS, MAX_COMPLETION, ROOMS, Call, Maze, draw, escaped, rows, try_door
from transformers import AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

MAZE = Maze(number="0042", rooms=2)


def test_each_door_opens_equally_often():
    mazes = draw(3000, rooms=[3])
    counts = [0] * DOORS
    for maze in mazes:
        for room, right in enumerate(maze.doors, 1):
            answers = [try_door(maze.number, room, door) for door in range(1, DOORS + 1)]
            assert answers[right - 1] == f"open, room {room + 1}"
            assert answers.count(f"closed, room {room}") == DOORS - 1
            counts[right - 1] += 1
    assert all(abs(count / 9000 - 1 / DOORS) < 0.02 for count in counts)
    pairs = [tuple(maze.doors[:2]) for maze in mazes]
    assert all(abs(pairs.count(pair) / 3000 - 1 / DOORS**2) < 0.03 for pair in set(pairs)), (
        "rooms tell nothing of others"
    )


def test_training_and_held_out_mazes_are_disjoint_and_reproducible():
    train, held_out = draw(7500), [maze for rooms in ROOMS for maze in draw(500, [rooms], True)]
    assert not {maze.number for maze in train} & {maze.number for maze in held_out}
    assert {maze.rooms for maze in train} == set(ROOMS)
    assert draw(20) == draw(20) != draw(20, seed=1)
    with pytest.raises(ValueError, match="got 9999"):
        draw(9999)


def test_straight_and_searching_walks_escape():
    source = random.Random(0)
    searched = []
    for maze in draw(300):
        straight, search = list(maze.straight()), list(maze.searched(source))
        searched += search
        assert all(call.opens for call in straight)
        assert len({(call.room, call.door) for call in search}) == len(search) <= maze.budget
        for walk in (straight, search):
            assert maze.is_left(maze.messages(walk))
            assert not maze.is_left(maze.messages(walk[:-1]))
    calls_of_a_room = len(searched) / sum(maze.rooms for maze in draw(300))
    assert calls_of_a_room == pytest.approx((DOORS + 1) / 2, abs=0.1)


def test_only_right_calls_after_mistakes_are_labels():
    source, mistakes = random.Random(0), 0
    for maze in draw(300):
        room = 1
        for call in maze.mistaken(source):
            if call.is_advised:
                assert (call.room, call.door) == (room, maze.doors[room - 1])
            mistakes += not call.is_advised
            room += call.room == room and call.opens
        assert room == maze.rooms + 1
    assert mistakes > 200


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        ([(1, 1), (2, 1)], True),
        ([(1, 2), (1, 1), (2, 2), (2, 1)], True),
        ([(1, 2), (1, 2), (1, 1), (2, 2), (2, 1)], False),  # more than the budget
        ([(2, 1), (1, 1)], False),  # a room that was not reached
        ([(2, 1), (1, 1), (2, 1)], True),
        ([(1, 1)], False),
        ([], False),
    ],
)
def test_a_maze_is_left_when_its_rooms_are_opened_in_turn_within_the_budget(calls, left):
    assert MAZE.doors == [1, 1]
    walk = MAZE.messages(Call(maze="0042", room=room, door=door) for room, door in calls)
    assert MAZE.is_left(walk) is left
    assert escaped([walk, []], maze=["0042", "0042"], rooms=[2, 2], prompts=None) == [float(left), 0.0]


@pytest.mark.parametrize(
    "function",
    [
        {"name": "open_door", "arguments": {"maze": "0042", "room": 1, "door": 1}},
        {"name": "try_door", "arguments": {"maze": "0041", "room": 1, "door": 1}},
        {"name": "try_door", "arguments": {"maze": "0042", "room": 1}},
        {"name": "try_door", "arguments": {}},
    ],
)
def test_calls_of_something_else_open_nothing(function):
    second = Call(maze="0042", room=2, door=1).messages
    assert not MAZE.is_left(
        [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}, *second]
    )


def test_only_the_teacher_reads_the_doors():
    (row,) = rows([MAZE])
    assert row == {
        "prompt": [{"role": "user", "content": "maze 0042, 2 rooms"}],
        "teacher_prompt": [{"role": "user", "content": "maze 0042, 2 rooms\n\ndoors 1 1"}],
        "maze": "0042",
        "rooms": 2,
    }
    assert rows([MAZE], is_told=True)[0]["prompt"] == row["teacher_prompt"]


@pytest.mark.parametrize("path", [None, STUDENT, TEACHER, GUIDE])
def test_the_tokenizer_and_its_templates_read_what_they_write(path):
    words = make_tokenizer() if path is None else AutoTokenizer.from_pretrained(path)
    assert len(words) == 30
    assert supports_tool_calling(words)
    assert is_chat_template_prefix_preserving(words)
    longest = Maze(number="9876", rooms=max(ROOMS))
    every = [Call(maze="9876", room=room, door=door) for room in ROOMS for door in range(1, DOORS + 1)]
    walk = longest.messages(every)
    text = words.apply_chat_template(longest.prompt_with_hint + walk, tokenize=False)
    ids = words(text)["input_ids"]
    assert words.decode(ids) == text
    assert words.unk_token_id not in ids
    asked = words.apply_chat_template(longest.prompt, add_generation_prompt=True)["input_ids"]
    assert len(words.apply_chat_template(longest.prompt + walk)["input_ids"]) - len(asked) <= MAX_COMPLETION
    written = text.split("<|assistant|>")[1].partition("<|tool|>")[0]
    message = parse_response(words, words(written)["input_ids"], prefix=asked, tools=[try_door])
    assert message["tool_calls"] == walk[0]["tool_calls"]


def test_labels_are_of_advised_calls_and_the_last_message():
    words = make_tokenizer()
    calls = [Call(maze="0042", room=1, door=2, is_advised=False), *MAZE.straight()]
    ids, labels = encoded(words, MAZE, calls, is_told=True)
    learned = words.decode([label for label in labels if label != -100])
    whole = words.apply_chat_template(MAZE.messages(MAZE.straight()), tokenize=False)
    assert learned == re.sub(r"<\|tool\|>open, room .<\|end\|>|<\|assistant\|>", "", whole)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
