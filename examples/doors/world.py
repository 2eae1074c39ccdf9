"""Mazes of rooms with several doors and one that opens: the tool that tries one, the environment, and who walks there.

Which doors of a maze open is drawn at random for each maze, and cannot be known from its number. In each room an agent
calls `try_door`, until the last one is open; it may call it as often as there are doors in the maze. The teacher reads
the right doors.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

DOORS = 2
"""Doors of a room."""

LEVELS = (1, 2, 3, 4)
OF = "rooms"
"""Difficulty: numbers of rooms that a maze may have."""

MAZES = 10_000
HELD_OUT_SHARE = 5
"""One maze in this many is held out."""

MOST_CALLS = DOORS * max(LEVELS)
MOST_TOKENS = 160
"""The longest walk through a maze of 4 rooms has 147."""

DONE = "out"
"""The last message."""


def _drawn(maze: str, what: str, below: int) -> int:
    """A number that is the same in every process, and says nothing of others."""
    return int.from_bytes(hashlib.sha256(f"{maze} {what}".encode()).digest()[:8]) % below


def right_door(maze: str, room: int) -> int:
    """The door that opens."""
    return 1 + _drawn(maze, f"room {room}", DOORS)


def try_door(maze: str, room: int, door: int) -> str:
    """Tries a door of a room.

    Args:
        maze: The number of the maze.
        room: The number of the room, from 1 on.
        door: The number of the door, from 1 on.

    Returns:
        Whether it is open or closed, and the room that one is in then.
    """
    return f"open, room {room + 1}" if door == right_door(maze, room) else f"closed, room {room}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Maze:
    """A maze of rooms, one after the other.

    Example:

    ```python
    >>> maze = Maze(number="0042", rooms=2)
    >>> maze.question, maze.hint
    ('maze 0042, 2 rooms', 'doors 1 1')
    ```
    """

    number: str
    rooms: int

    @property
    def question(self) -> str:
        return f"maze {self.number}, {self.rooms} rooms"

    @property
    def doors(self) -> list[int]:
        """The door of each room that opens."""
        return [right_door(self.number, room) for room in range(1, self.rooms + 1)]

    @property
    def hint(self) -> str:
        return " ".join(["doors", *map(str, self.doors)])

    @property
    def is_held_out(self) -> bool:
        return _drawn(self.number, "held out", HELD_OUT_SHARE) == 0


def draw(count: int, levels: Sequence[int] = LEVELS, held_out: bool = False, seed: int = 0) -> list[Maze]:
    """Different mazes, from one side of the split by their numbers; numbers of rooms come in turn."""
    source = random.Random(seed)
    numbers = source.sample(range(MAZES), MAZES)
    mazes = (Maze(number=f"{number:04d}", rooms=levels[place % len(levels)]) for place, number in enumerate(numbers))
    found = [maze for maze in mazes if maze.is_held_out == held_out][:count]
    if len(found) < count:
        raise ValueError(f"There are {len(found)} mazes on this side of the split; got {count}.")
    return found


def rows(count: int, levels: Sequence[int] = LEVELS, held_out: bool = False, seed: int = 0) -> Dataset:
    """Prompts of mazes that are drawn, and what [`Doors`] needs."""
    return of_mazes(draw(count, levels, held_out, seed))


def of_mazes(mazes: Iterable[Maze]) -> Dataset:
    """Prompts, and what [`Doors`] needs."""
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": maze.question}], "maze": maze.number, "rooms": maze.rooms}
            for maze in mazes
        ]
    )


class Doors:
    """A maze as an environment: its tool, and what only the teacher knows."""

    def reset(self, maze: str, rooms: int, **_: Any) -> None:
        """Begins a walk. The prompt has told the maze already."""
        self.maze, self.room, self.calls = Maze(number=maze, rooms=rooms), 1, 0
        self.tried: list[int] = []
        self.is_left = False

    def try_door(self, maze: str, room: int, door: int) -> str:
        self.calls += 1
        if not self.is_left and (maze, room) == (self.maze.number, self.room):
            self.tried.append(door)
            if door == right_door(maze, room):
                self.room, self.tried = room + 1, []
                self.is_left = self.room > self.maze.rooms and self.calls <= DOORS * self.maze.rooms
        return try_door(maze, room, door)

    def get_privileged_context(self) -> str:
        """The doors."""
        return self.maze.hint

    def get_reward(self) -> float:
        """1 if the walk led out, within as many calls as there are doors."""
        return float(self.is_left)


Doors.try_door.__doc__ = try_door.__doc__

# ---- Who walks -------------------------------------------------------------------------------------------------------

Call = tuple[str, dict[str, Any]]


def _call(world: Doors, door: int, room: int | None = None) -> Call:
    return "try_door", {"maze": world.maze.number, "room": room or world.room, "door": door}


def knowing(world: Doors) -> Call | None:
    """The next call of someone who knows the doors: no door is closed. `None` at the end."""
    return None if world.room > world.maze.rooms else _call(world, right_door(world.maze.number, world.room))


def searching(world: Doors, source: random.Random) -> Call:
    """The next call of someone who does not: in each room one door after the other."""
    return _call(world, source.choice([door for door in range(1, DOORS + 1) if door not in world.tried]))


def stray(world: Doors, source: random.Random) -> Call:
    """A call at random, half of them in another room."""
    room = world.room if source.random() < 0.5 else source.randint(1, world.maze.rooms)
    return _call(world, source.randint(1, DOORS), room)
