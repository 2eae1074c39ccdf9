"""Worlds of agents: walks through them end well, nobody can know them, and methods train on what they say."""

from __future__ import annotations

import random
import sqlite3

import agents
import compare_agents
import pytest
from agents import TASKS, encoded
from compare_agents import METHODS, Curve, Judge, Method, build, environment
from doors import DOORS
from doors.world import Doors, Maze, of_mazes, right_door
from environments.worlds import END, Scripted, call, words
from house.world import House
from sql import train
from sql.world import QUESTIONS, Database
from support import tiny
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDTrainer

MAZES = TASKS["doors"]


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
    house.go(house.of_chest)
    assert (house.open(), house.get_reward()) == ("The chest is open.", 1.0)


# ---- Doors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        ([(1, 2), (1, 1), (2, 2), (2, 1)], True),
        ([(1, 2), (1, 2), (1, 1), (2, 2), (2, 1)], False),  # more than there are doors
        ([(2, 1), (1, 1)], False),  # a room that was not reached
        ([(1, 1), (2, 1), (3, right_door("0042", 3)), (1, 1), (1, 1)], True),  # out is out
        ([], False),
    ],
)
def test_maze_is_left_by_opening_its_rooms_in_turn(calls, left):
    maze, world = Maze(number="0042", rooms=2), Doors()
    assert maze.doors == [1, 1]
    world.reset(maze.number, maze.rooms)
    for room, door in calls:
        world.try_door(maze.number, room, door)
    assert world.get_reward() == left


# ---- The comparison -------------------------------------------------------------------------------------------------


def measured(name, folder, is_told):
    return Judge(MAZES, DOORS, folder, 40, is_told).measure(AutoModelForCausalLM.from_pretrained(DOORS / name))


@pytest.mark.parametrize("name", ["teacher", pytest.param("guide", marks=pytest.mark.long)])
def test_who_is_told_the_doors_escapes(tmp_path, name):
    assert min(measured(name, tmp_path, True).values()) >= 0.95


def test_student_rarely_escapes(tmp_path):
    student = measured("student", tmp_path, False)
    assert student["sampled/1"] < 0.8
    assert student["sampled/2"] < 0.5
    assert max(student[f"{how}/{rooms}"] for how in ("sampled", "greedy") for rooms in (3, 4)) < 0.35


def test_each_method_tells_whom_it_says():
    (row,) = of_mazes([Maze(number="0042", rooms=2)])
    assert MAZES.question(Doors(), row, is_told=False) == row.pop("prompt")
    methods, told = {"before": Method(), "after": Method(tells_afterwards=True), "both": Method(is_told=True)}, {}
    for name, method in methods.items():
        world = environment(MAZES, method)()
        told[name] = world.reset(**row), world.get_privileged_context(), world.get_feedback()
    assert told == {
        "before": ("", "doors 1 1", None),
        "after": ("", None, "doors 1 1"),
        "both": ("\n\ndoors 1 1", None, None),
    }


class Walks(OPSDTrainer):
    """Keeps the completions that are taught."""

    walks: list[str]

    def teach(self, rollout, rows):
        self.walks = self.processing_class.batch_decode(rollout.completion_lists())
        return super().teach(rollout, rows)


@pytest.mark.parametrize("name", ["on-policy, forward KL", "off-policy, forward KL"])
def test_only_on_policy_walks_have_closed_doors(name, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_agents, "OPSDTrainer", Walks)
    curve = Curve(lambda *_: {}, {"tokens": 1, "seconds": 1e-9}, points=1)
    trainer = build(MAZES, METHODS[name], DOORS, MAZES.world.rows(64), curve, seed=0, rate=1e-4, folder=tmp_path)
    trainer.train()
    assert [point["step"] for point in curve.points] == [0, 1]
    closed = [walk for walk in trainer.walks if "closed" in walk]
    assert len(trainer.walks) == 32
    assert len(closed) > 8 if METHODS[name].is_on_policy else not closed
    if not METHODS[name].is_on_policy:
        assert all(walk.endswith("<|assistant|>out<|end|>") for walk in trainer.walks)


# ---- Databases -------------------------------------------------------------------------------------------------------


def begun(seed, tables=3):
    world = Database()
    return world, world.reset(seed, tables)


def test_query_of_each_question_finds_its_answer_and_dictionary_names_its_table():
    asked = set()
    for row in TASKS["sql"].world.rows(80):
        world, question = begun(**row)
        asked |= {words for words in QUESTIONS if words.split("{")[0] in question}
        found = {query: world.query(query) for query in world.possible_queries}
        assert found.pop(world.right_query) == f"[({world.right_answer},)]"
        assert set(found.values()) <= {"[(None,)]", "[(0,)]"}, "only one table has rows of this name"
        (right,) = [table for table in world.tables if table in world.right_query]
        thing = world.get_privileged_context().split(f" are in {right}")[0].rpartition(", ")[2]
        assert thing in question
        assert all(table in question for table in world.tables)
        assert world.get_reward() == 0
        world.submit(f" {world.right_answer}")
        assert (world.get_reward(), world.get_feedback()) == (1, None)
        world.submit("nobody")
        assert world.right_query in world.get_feedback()
    assert asked == QUESTIONS.keys()


@pytest.mark.parametrize(
    "sql",
    [
        "insert into {table} values ('Ada', 1)",
        "drop table {table}",
        "attach database '/tmp/x' as x",
        "pragma writable_schema=1",
        "select load_extension('x')",
        "select 1; select 2",
        "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n",
        "select hex(zeroblob(900000000))",
        "select group_concat(a.name || b.name) from sqlite_schema a, sqlite_schema b, (select zeroblob(9000000))",
    ],
)
def test_a_query_may_only_read_and_ends(sql):
    world, _ = begun(1)
    with pytest.raises((sqlite3.Error, sqlite3.Warning)):
        world.query(sql.format(table=world.tables[0]))


def test_an_agent_is_trained_and_the_best_one_kept(tmp_path):
    words().save_pretrained(tmp_path / "model")
    tiny.qwen2(max_position_embeddings=4096).save_pretrained(tmp_path / "model")

    def turns(prompt: str) -> str:
        if prompt.count("<tool_response>") == 0:
            return call("query", sql="select name from sqlite_schema order by name")
        return call("submit", answer="3") if prompt.count("<tool_response>") == 1 else f"done{END}"

    given = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--steps", "2", "--rows", "2"]
    trainer = train.main([*given, "--held-out", "8"], rollout=Scripted(turns))
    shares = tiny.logged(trainer, "eval_rewards/Database/mean")
    right = sum(one.right_answer == "3" for one in trainer.environments)
    assert shares == [right / 8] * len(shares)
    assert trainer.state.best_metric == right / 8
    assert tiny.logged(trainer, "tools/call_frequency") == [2]
    asked = trainer.processing_class.decode(trainer.rollout.asked[-1][0])
    assert " are in " not in asked.partition("</tool_response>")[0].rpartition("<|im_start|>user")[2]
    assert "sqlite_schema" in asked
