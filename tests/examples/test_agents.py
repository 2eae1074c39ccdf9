"""Worlds of agents: who knows them solves them, nobody else can; and an agent is trained in them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import train_agent
from doors.world import Doors, Maze, right_door
from environments.worlds import END, Scripted, call, words
from house.world import House
from sql.world import QUESTIONS, Database
from support import tiny
from transformers import AutoModelForCausalLM

CASE = Path(train_agent.__file__).parent / "cases" / "agents.yaml"


@pytest.mark.parametrize("name", train_agent.WORLDS)
def test_who_knows_a_world_solves_it_within_the_calls(name):
    environment, world = train_agent.WORLDS[name]
    for row in world.rows(200):
        acting, calls = environment(), 0
        acting.reset(**row)
        while advised := world.knowing(acting):
            getattr(acting, advised[0])(**advised[1])
            calls += 1
        assert acting.get_reward() == 1
        assert calls <= world.MOST_CALLS


@pytest.mark.parametrize("name", train_agent.WORLDS)
def test_held_out_rows_are_others_and_levels_come_in_turn(name):
    world = train_agent.WORLDS[name][1]
    (column,) = {"maze", "seed"} & set(world.rows(1).column_names)
    drawn = [
        set(world.rows(400, held_out=held_out, seed=seed)[column]) for held_out in (False, True) for seed in (0, 1)
    ]
    assert not (drawn[0] | drawn[1]) & (drawn[2] | drawn[3])
    assert drawn[0] != drawn[1]
    assert set(world.rows(100)[{"doors": "rooms"}.get(name, world.OF)]) == set(world.LEVELS)


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


# ---- Databases -------------------------------------------------------------------------------------------------------


def begun(seed, tables=3):
    world = Database()
    return world, world.reset(seed, tables)


def test_query_of_each_question_finds_its_answer_and_dictionary_names_its_table():
    asked = set()
    for row in train_agent.WORLDS["sql"][1].rows(80):
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

    given = [f"--model_name_or_path={tmp_path / 'model'}", f"--output_dir={tmp_path / 'out'}", "--max_steps=2"]
    given += ["--eval_steps=1", "--logging_steps=1", "--per_device_train_batch_size=2", "--held_out=8", "--bf16=false"]
    trainer = train_agent.main(["--world", "sql", "--config", str(CASE), *given], rollout=Scripted(turns))
    shares = tiny.logged(trainer, "eval_rewards/Database/mean")
    right = sum(one.right_answer == "3" for one in trainer.environments)
    assert shares == [right / 8] * len(shares)
    assert trainer.state.best_metric == right / 8
    assert tiny.logged(trainer, "tools/call_frequency") == [2, 2]
    asked = trainer.processing_class.decode(trainer.rollout.asked[-1][0])
    assert " are in " not in asked.partition("</tool_response>")[0].rpartition("<|im_start|>user")[2]
    assert "sqlite_schema" in asked


@pytest.mark.parametrize(("steps", "least"), [(2, 0.0), pytest.param(300, 0.8, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
def test_doors_are_learned_from_small_models_without_options(tmp_path, capsys, steps, least):
    few = (
        []
        if steps > 2
        else ["--max_steps=2", "--eval_steps=2", "--lr_scheduler_kwargs={}", "--lr_scheduler_type=constant"]
    )
    trainer = train_agent.main(["--output_dir", str(tmp_path), *few])
    before, *_, after = tiny.logged(trainer, "eval_rewards/Doors/mean")
    assert before < 0.4
    assert least <= after
    assert f"{before:.3f} before, {after:.3f} after; the student: {tmp_path}" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == 108_992
