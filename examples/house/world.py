"""A house of some rooms: in one lies a key, in another stands a chest that it opens. Where, only the teacher reads.

Who does not know visits one room after the other, remembers where the chest was, and comes back with the key. As many
calls as that can take are allowed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

LEVELS = (2, 3, 4, 5)
OF = "rooms"
"""Difficulty: numbers of rooms."""

MOST_CALLS = max(LEVELS) + 3
"""Calls in which the chest can always be opened: every room, one of them again, the key and the chest."""

MOST_TOKENS = 200
DONE = "done"
"""The last message."""

ROOMS = ("attic", "cellar", "kitchen", "library", "nursery", "pantry", "porch", "study")

Call = tuple[str, dict[str, Any]]


class House:
    """A house as an environment, drawn from a seed.

    Example:

    ```python
    >>> house = House()
    >>> house.reset(seed=0, rooms=2), house.get_privileged_context()
    ('The rooms are porch, study. Open the chest.', 'The key is in the study, the chest in the porch.')
    >>> house.go("study"), house.take(), house.go("porch"), house.open(), house.get_reward()
    ('study: a key.', 'You have the key.', 'porch: a chest.', 'The chest is open.', 1.0)
    ```
    """

    def reset(self, seed: int, rooms: int, **_: Any) -> str:
        """Makes another house; its rooms and what is to be done there."""
        draw = random.Random(seed)
        self.rooms = draw.sample(ROOMS, rooms)
        self.of_key, self.of_chest = draw.sample(self.rooms, 2)
        self.room, self.has_key, self.is_open = "", False, False
        self.seen: list[str] = []
        return f"The rooms are {', '.join(self.rooms)}. Open the chest."

    def go(self, room: str) -> str:
        """Goes to a room.

        Args:
            room: Its name.

        Returns:
            What is there.
        """
        if room not in self.rooms:
            raise ValueError(f"There is no {room}.")
        self.room = room
        self.seen.append(room)
        thing = {self.of_chest: "a chest", **({} if self.has_key else {self.of_key: "a key"})}.get(room, "nothing")
        return f"{room}: {thing}."

    def take(self) -> str:
        """Takes what lies in this room.

        Returns:
            What one has now.
        """
        self.has_key = self.has_key or self.room == self.of_key
        return "You have the key." if self.has_key else "You have nothing."

    def open(self) -> str:
        """Opens the chest in this room.

        Returns:
            Whether it is open.
        """
        if self.room != self.of_chest:
            return "There is no chest."
        self.is_open = self.is_open or self.has_key
        return "The chest is open." if self.is_open else "The chest is locked."

    def get_reward(self) -> float:
        """1 if the chest is open."""
        return float(self.is_open)

    def get_privileged_context(self) -> str:
        """Where the key and the chest are."""
        return f"The key is in the {self.of_key}, the chest in the {self.of_chest}."


def rows(count: int, levels: Sequence[int] = LEVELS, held_out: bool = False, seed: int = 0) -> Dataset:
    """Houses by their seeds, with so many rooms in turn."""
    first = (1_000 * held_out + seed) * 1_000_000
    turns = [levels[place % len(levels)] for place in range(count)]
    return Dataset.from_dict({"seed": list(range(first, first + count)), "rooms": turns})


# ---- Who plays -------------------------------------------------------------------------------------------------------


def knowing(house: House) -> Call | None:
    """The next call of someone who knows where the key and the chest are, and `None` when it is open."""
    if house.is_open:
        return None
    room = house.of_chest if house.has_key else house.of_key
    if house.room != room:
        return "go", {"room": room}
    return ("open" if house.has_key else "take"), {}


def searching(house: House, source: random.Random) -> Call:
    """The next call of someone who has to find them."""
    if (house.of_chest if house.has_key else house.of_key) in house.seen:
        return knowing(house)
    return "go", {"room": source.choice([room for room in house.rooms if room not in house.seen])}


def stray(house: House, source: random.Random) -> Call:
    """A call at random."""
    name = source.choice(["go", "go", "go", "take", "open"])
    return name, ({"room": source.choice(house.rooms)} if name == "go" else {})
