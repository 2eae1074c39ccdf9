"""Questions about a database whose tables have names that tell nothing: in which to look, only the teacher reads.

An agent asks SQLite with `query`, in a sandbox that can only be read from, and answers with `submit`. Who does not know
the data dictionary tries one table after the other: only one has rows of whom the question is about.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

LEVELS = (1, 2, 3, 4)
OF = "tables"
"""Difficulty: numbers of tables."""

MOST_CALLS = max(LEVELS) + 2
"""Calls that suffice: each table, the answer, and a mistake."""

MOST_TOKENS = 240
DONE = "done"
"""The last message."""

THINGS = {
    "orders": "price",
    "trips": "distance",
    "matches": "goals",
    "harvests": "weight",
    "loans": "amount",
    "shifts": "hours",
}
"""What a table is about, and what is counted there."""

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Liv")

QUESTIONS = {
    "How many {thing} are there of {name}?": "select count(*) from {table} where c1 = '{name}'",
    "What is the total {much} of all {thing} of {name}?": "select sum(c2) from {table} where c1 = '{name}'",
    "What is the largest {much} of all {thing} of {name}?": "select max(c2) from {table} where c1 = '{name}'",
}
"""And the query that answers each."""

MOST_ROWS, MOST_STEPS, MOST_BYTES = 20, 100_000, 10_000
"""Rows that are shown of a result, steps of SQLite's machine after which a query ends, and bytes of a value."""

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

Call = tuple[str, dict[str, Any]]


class Database:
    """Tables in memory, drawn from a seed.

    Attributes:
        tables (`list[str]`): their names.
        possible_queries (`list[str]`): the same query of each table.
        right_query (`str`): the one that answers the question.
        right_answer (`str`): what is to be submitted.
        queries (`list[str]`): what was asked.
        submitted (`str`): the last answer.

    Example:

    ```python
    >>> world = Database()
    >>> question = world.reset(seed=3, tables=2)
    >>> world.query(world.right_query), world.submit(world.right_answer), world.get_reward()
    ('[(80,)]', 'Thank you.', 1.0)
    ```
    """

    def reset(self, seed: int, tables: int, **_: Any) -> str:
        """Makes another database; the question about it."""
        draw = random.Random(seed)
        self.tables = [f"t{number}" for number in draw.sample(range(1, 10), tables)]
        people = draw.sample(NAMES, 3 * tables)
        self._it = sqlite3.connect(":memory:")
        for place, table in enumerate(self.tables):
            self._it.execute(f"create table {table}(c1 text, c2 integer)")
            theirs = people[3 * place : 3 * place + 3]
            drawn = [(name, draw.randint(1, 99)) for name in [*theirs, *draw.choices(theirs, k=5)]]
            self._it.executemany(f"insert into {table} values (?, ?)", drawn)
        place = draw.randrange(tables)
        thing, much = draw.choice(list(THINGS.items()))
        known = {"thing": thing, "much": much, "name": draw.choice(people[3 * place : 3 * place + 3])}
        self._entry = f"{thing} are in {self.tables[place]}."
        words, query = draw.choice(list(QUESTIONS.items()))
        self.possible_queries = [query.format(table=table, **known) for table in self.tables]
        self.right_query, self.queries, self.submitted = self.possible_queries[place], list[str](), ""
        self.right_answer = str(self._it.execute(self.right_query).fetchone()[0])
        self._it.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        self._it.set_progress_handler(lambda: 1, MOST_STEPS)
        self._it.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        return f"{words.format(**known)} The tables {', '.join(self.tables)} have columns c1 (text) and c2 (integer)."

    def query(self, sql: str) -> str:
        """Runs a query.

        Args:
            sql: One statement in SQL, which may only read.

        Returns:
            The first rows of the result.
        """
        self.queries.append(sql)
        return str(self._it.execute(sql).fetchmany(MOST_ROWS))

    def submit(self, answer: str) -> str:
        """Answers the question.

        Args:
            answer: A name or a number.

        Returns:
            Nothing of interest.
        """
        self.submitted = str(answer).strip()
        return "Thank you."

    def get_reward(self) -> float:
        """1 if the last answer is right."""
        return float(self.submitted == self.right_answer)

    def get_privileged_context(self) -> str:
        """The entry of the data dictionary."""
        return self._entry

    def get_feedback(self) -> str | None:
        """What would have been right, if the answer was not."""
        return None if self.get_reward() else f"`{self.right_query}` answers the question: {self.right_answer}."


def rows(count: int, levels: Sequence[int] = LEVELS, held_out: bool = False, seed: int = 0) -> Dataset:
    """Databases by their seeds, with so many tables in turn. Each brings its own question."""
    first = (1_000 * held_out + seed) * 1_000_000
    turns = [levels[place % len(levels)] for place in range(count)]
    return Dataset.from_dict({"seed": list(range(first, first + count)), "tables": turns})


# ---- Who plays -------------------------------------------------------------------------------------------------------


def knowing(world: Database) -> Call | None:
    """The next call of someone who has the data dictionary, and `None` when the question is answered."""
    if world.right_query not in world.queries:
        return "query", {"sql": world.right_query}
    return None if world.get_reward() else ("submit", {"answer": world.right_answer})


def searching(world: Database, source: random.Random) -> Call:
    """The next call of someone who has to find the table."""
    if world.right_query in world.queries:
        return knowing(world)
    return "query", {"sql": source.choice([one for one in world.possible_queries if one not in world.queries])}


def stray(world: Database, source: random.Random) -> Call:
    """A call at random: a wrong answer, another table, one that does not exist, or words in the wrong places."""
    what, query = source.random(), source.choice(world.possible_queries)
    if what < 0.3:
        return "submit", {"answer": source.choice(["None", "0", str(source.randint(1, 99))])}
    words = query.split(" ")
    if what > 0.6:
        words[words.index("from") + 1] = f"t{source.randint(1, 9)}"
    if what > 0.8:
        for _ in range(source.randint(1, 3)):
            words[source.randrange(1, len(words))] = source.choice(words)
    return "query", {"sql": " ".join(words)}
