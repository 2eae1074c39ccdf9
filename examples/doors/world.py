"""Mazes of rooms with several doors, of which one opens: the tool that tries one, walks, their text, and grading.

Which doors of a maze open is drawn at random for each maze, and cannot be known from its number. In each room an agent
calls `try_door`, until the last one is open; it may call it as often as there are doors in the maze. The teacher reads
the right doors.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

DOORS = 2
"""Doors of a room."""

ROOMS = (1, 2, 3, 4)
"""Numbers of rooms that a maze may have."""

MAZES = 10_000
HELD_OUT_SHARE = 5
"""One maze in this many is held out."""

MAX_COMPLETION = 160
"""Tokens; the longest walk through a maze of 4 rooms has 147."""


def _drawn(maze: str, what: str, below: int) -> int:
    """A number that is the same in every process, and says nothing of others."""
    return int.from_bytes(hashlib.sha256(f"{maze} {what}".encode()).digest()[:8]) % below


def try_door(maze: str, room: int, door: int) -> str:
    """Tries a door of a room.

    Args:
        maze: The number of the maze.
        room: The number of the room, from 1 on.
        door: The number of the door, from 1 on.

    Returns:
        Whether it is open or closed, and the room that one is in then.
    """
    return f"open, room {room + 1}" if door == _right_door(maze, room) else f"closed, room {room}"


def _right_door(maze: str, room: int) -> int:
    return 1 + _drawn(maze, f"room {room}", DOORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of `try_door` by someone in a maze.

    Attributes:
        is_advised (`bool`): whether a model is to learn it; one that was made at random is there to be recovered from.
    """

    maze: str
    room: int
    door: int
    is_advised: bool = True

    @property
    def opens(self) -> bool:
        return self.door == _right_door(self.maze, self.room)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The call, and the answer."""
        arguments = {"maze": self.maze, "room": self.room, "door": self.door}
        call = {"type": "function", "function": {"name": "try_door", "arguments": arguments}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "try_door", "content": try_door(self.maze, self.room, self.door)},
        ]


LEFT = {"role": "assistant", "content": "out"}
"""The last message of a walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maze:
    """A maze of rooms, one after the other.

    Example:

    ```python
    >>> maze = Maze(number="0042", rooms=2)
    >>> maze.question, maze.hint
    ('maze 0042, 2 rooms', 'doors 1 1')
    >>> [(call.room, call.door, call.opens) for call in maze.straight()]
    [(1, 1, True), (2, 1, True)]
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
        return [_right_door(self.number, room) for room in range(1, self.rooms + 1)]

    @property
    def hint(self) -> str:
        return " ".join(["doors", *map(str, self.doors)])

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    @property
    def prompt_with_hint(self) -> list[dict[str, str]]:
        """What the trainer makes of `prompt` and the hint as `privileged_context`."""
        return [{"role": "user", "content": f"{self.question}\n\n{self.hint}"}]

    @property
    def budget(self) -> int:
        """Calls that suffice to find the way out without knowing anything."""
        return DOORS * self.rooms

    @property
    def is_held_out(self) -> bool:
        return _drawn(self.number, "held out", HELD_OUT_SHARE) == 0

    # ---- Walks -------------------------------------------------------------------------------------------------------

    def straight(self) -> Iterator[Call]:
        """Of someone who knows the doors: no door is closed."""
        for room, door in enumerate(self.doors, 1):
            yield Call(maze=self.number, room=room, door=door)

    def searched(self, source: random.Random) -> Iterator[Call]:
        """Of someone who does not: in each room one door after the other."""
        for room, right in enumerate(self.doors, 1):
            order = source.sample(range(1, DOORS + 1), DOORS)
            for door in order[: order.index(right) + 1]:
                yield Call(maze=self.number, room=room, door=door)

    def mistaken(self, source: random.Random, share: float = 0.4) -> Iterator[Call]:
        """Of someone who knows the doors, and is made to call at random instead, for a share of the calls."""
        room = 1
        while room <= self.rooms:
            if source.random() < share:
                where = room if source.random() < 0.5 else source.randint(1, self.rooms)
                call = Call(maze=self.number, room=where, door=source.randint(1, DOORS), is_advised=False)
            else:
                call = Call(maze=self.number, room=room, door=self.doors[room - 1])
            yield call
            room += call.room == room and call.opens

    def messages(self, calls: Iterable[Call]) -> list[dict[str, Any]]:
        """A walk that ends outside, without its prompt."""
        return [message for call in calls for message in call.messages] + [LEFT]

    def is_left(self, completion: Sequence[dict[str, Any]]) -> bool:
        """Whether the calls in these messages open one room after the other, and are not more than the budget."""
        called = [call["function"] for message in completion for call in message.get("tool_calls") or []]
        room = 1
        for function in called[: self.budget]:
            arguments = function["arguments"]
            here = {"maze": self.number, "room": room}
            if function["name"] == "try_door" and arguments == {**here, "door": arguments.get("door")}:
                room += room <= self.rooms and arguments["door"] == _right_door(self.number, room)
        return room > self.rooms


def draw(count: int, rooms: Sequence[int] = ROOMS, held_out: bool = False, seed: int = 0) -> list[Maze]:
    """Different mazes, from one side of the split by their numbers; numbers of rooms come in turn."""
    source = random.Random(seed)
    numbers = source.sample(range(MAZES), MAZES)
    mazes = (Maze(number=f"{number:04d}", rooms=rooms[place % len(rooms)]) for place, number in enumerate(numbers))
    found = [maze for maze in mazes if maze.is_held_out == held_out][:count]
    if len(found) < count:
        raise ValueError(f"There are {len(found)} mazes on this side of the split; got {count}.")
    return found


def rows(mazes: Sequence[Maze], is_told: bool = False) -> Dataset:
    """Prompts, what the teacher reads besides, and what [`escaped`] needs.

    Args:
        mazes (`Sequence[Maze]`):
            One for each row.
        is_told (`bool`, *optional*, defaults to `False`):
            Whether the student reads the doors too.
    """
    return Dataset.from_dict(
        {
            "prompt": [maze.prompt_with_hint if is_told else maze.prompt for maze in mazes],
            "teacher_prompt": [maze.prompt_with_hint for maze in mazes],
            "maze": [maze.number for maze in mazes],
            "rooms": [maze.rooms for maze in mazes],
        }
    )


def escaped(completions: list[Any], maze: list[str], rooms: list[int], **_: Any) -> list[float]:
    """A reward as TRL's trainers call it: 1 for each walk that leads out, else 0."""
    mazes = (Maze(number=number, rooms=count) for number, count in zip(maze, rooms, strict=True))
    return [float(one.is_left(walk)) for one, walk in zip(mazes, completions, strict=True)]


class Doors:
    """A maze as an environment: its tool, what only the teacher knows, and what can be said afterwards.

    Attributes:
        says_doors (`bool`): whether the teacher is told the doors before the walk, and not only after it.
    """

    says_doors = True

    def reset(self, maze: str, rooms: int, **_: Any) -> None:
        """Begins a walk. The prompt has told the maze already."""
        self._maze, self._calls = Maze(number=maze, rooms=rooms), []

    def try_door(self, maze: str, room: int, door: int) -> str:
        self._calls.append(Call(maze=maze, room=room, door=door))
        return try_door(maze, room, door)

    def get_privileged_context(self) -> str | None:
        """The doors."""
        return self._maze.hint if self.says_doors else None

    def get_reward(self) -> float:
        """1 if the walk led out within the budget."""
        return float(self._maze.is_left([one.messages[0] for one in self._calls]))


Doors.try_door.__doc__ = try_door.__doc__


class DoorsAfterwards(Doors):
    """The doors are told after the walk, as feedback on it."""

    says_doors = False

    def get_feedback(self) -> str:
        """The doors."""
        return self._maze.hint
