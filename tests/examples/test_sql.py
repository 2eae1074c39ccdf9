"""An agent in databases: the sandbox, what is told to whom, and a training of it."""

from __future__ import annotations

import sqlite3

import pytest
from environments.worlds import END, Scripted, call, words
from sql import train
from sql.world import QUESTIONS, Database, rows
from support import tiny


def begun(seed, tables=3):
    world = Database()
    return world, world.reset(seed, tables)


def test_query_of_each_question_finds_its_answer_and_dictionary_names_its_table():
    asked = set()
    for row in rows(80):
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
    made = words()
    made.save_pretrained(tmp_path / "model")
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
