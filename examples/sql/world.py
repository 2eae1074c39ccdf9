"""Questions about databases: a sandbox for queries, what only the teacher knows, and grading.

An agent asks SQLite with `query` and answers with `submit`. The student is told the question alone, so it has to find
out which tables there are; the teacher reads the schema, and after the episode what would have been right.
"""

from __future__ import annotations

import random
import sqlite3
from typing import Any

from datasets import Dataset

THINGS = {
    "orders": ("client", "price"),
    "trips": ("driver", "distance"),
    "matches": ("team", "goals"),
    "harvests": ("farm", "tonnes"),
    "loans": ("branch", "amount"),
    "shifts": ("nurse", "hours"),
}
"""What a table is about: who, and how much."""

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")

QUESTIONS = {
    "How many {thing} are there for {name}?": "select count(*) from {table} where {who} = '{name}'",
    "What is the total {much} of all {thing} of {name}?": "select sum({many}) from {table} where {who} = '{name}'",
    "Who has the largest {much} of all {thing}?": "select {who} from {table} order by {many} desc limit 1",
}
"""And the query that answers each."""

MOST_ROWS, MOST_STEPS, MOST_BYTES = 20, 100_000, 10_000
"""Rows that are shown of a result, steps of SQLite's machine after which a query ends, and bytes of a value."""

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


class Database:
    """A table in memory, drawn from a seed; its name and its columns have a suffix that cannot be guessed.

    Example:

    ```python
    >>> world = Database()
    >>> question = world.reset(seed=3)
    >>> world.query(world.right_query), world.submit(world.right_answer), world.get_reward()
    ("[('Eve',)]", 'Thank you.', 1.0)
    ```
    """

    def reset(self, seed: int, **_: Any) -> str:
        """Makes another table; the question about it."""
        draw = random.Random(seed)
        thing = draw.choice(list(THINGS))
        who, much = (f"{column}_{draw.randint(10, 99)}" for column in THINGS[thing])
        self._table, self._submitted = f"{thing}_{draw.randint(10, 99)}", ""
        amounts = draw.sample(range(1, 100), 12)
        names = [draw.choice(NAMES) for _ in amounts]
        words, query = draw.choice(list(QUESTIONS.items()))
        known = {"thing": thing, "much": THINGS[thing][1], "name": draw.choice(names)}
        self._schema = f"{self._table}({who} text, {much} integer)"
        self._it = sqlite3.connect(":memory:")
        self._it.execute(f"create table {self._schema}")
        self._it.executemany(f"insert into {self._table} values (?, ?)", list(zip(names, amounts, strict=True)))
        self.right_query = query.format(table=self._table, who=who, many=much, **known)
        self.right_answer = str(self._it.execute(self.right_query).fetchone()[0])
        self._it.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        self._it.set_progress_handler(lambda: 1, MOST_STEPS)
        self._it.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        return words.format(**known)

    def query(self, sql: str) -> str:
        """Runs a query. The table `sqlite_schema` tells of all others.

        Args:
            sql: One statement in SQL, which may only read.

        Returns:
            The first rows of the result.
        """
        return str(self._it.execute(sql).fetchmany(MOST_ROWS))

    def submit(self, answer: str) -> str:
        """Answers the question.

        Args:
            answer: A name or a number.

        Returns:
            Nothing of interest.
        """
        self._submitted = str(answer).strip()
        return "Thank you."

    def get_reward(self) -> float:
        """1 if the last answer is right."""
        return float(self._submitted == self.right_answer)

    def get_privileged_context(self) -> str:
        """The schema."""
        return f"The only table is {self._schema}."

    def get_feedback(self) -> str | None:
        """What would have been right, if the answer was not."""
        return None if self.get_reward() else f"`{self.right_query}` answers the question: {self.right_answer}."


def rows(count: int, first: int = 0) -> Dataset:
    """Databases by their seeds; each brings its own question."""
    return Dataset.from_dict({"seed": list(range(first, first + count))})
