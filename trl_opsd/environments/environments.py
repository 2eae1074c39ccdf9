"""The environments of a trainer: made once, reset for each row, asked for tools, rewards and what teachers read."""

from __future__ import annotations

import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from accelerate.logging import get_logger

from trl_opsd.environments.worker import Late, Wait, Worker, waited

logger = get_logger(__name__)

_OURS = ("reset", "get_reward", "get_privileged_context", "get_feedback")
"""Methods that are no tools."""

EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a row that has none, to which the environment adds its observation."""


@dataclass(frozen=True, slots=True)
class Called:
    """What a tool answered."""

    name: str
    content: str | list[dict[str, Any]]
    """Text, or parts of a message."""
    failed: bool = False


@final
class _Instance:
    """One environment, made and called in its own thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._worker = make, Worker()
        self.it: Any = None
        self.is_lost = False

    def start(self, job: Callable[[Wait], Any]) -> Future[Any] | None:
        return None if self.is_lost else self._worker.start(job)

    def make(self, _: Wait) -> None:
        self.it = self._make()

    def begin(self, row: Mapping[str, Any], wait: Wait) -> tuple[Any, Any]:
        """The observation at the start of an episode, and what only the teacher may read."""
        if self.it is None:
            self.it = self._make()
        observation = wait(self.it.reset(**row))
        return observation, wait(getattr(self.it, "get_privileged_context", _nothing)())


@final
class Environments:
    """The environments of a trainer, with TRL's semantics of an `environment_factory`.

    Each is made and called in a thread of its own, so those of a batch act at the same time.

    Args:
        factory (`Callable` or `dict[str, Callable]`):
            Makes an environment; by the column `environment` of a row if there are several.
        tools (`Sequence[Callable]`):
            Those that agents have in every environment.
        seconds (`float`, *optional*):
            How long `reset`, the calls of a turn, `get_reward` and `get_feedback` may take each.

    Raises:
        ValueError: An environment has no `reset`, or a tool cannot be described.
    """

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any]], seconds: float | None) -> None:
        self.are_several = isinstance(factory, Mapping)
        self._factories: dict[str | None, Callable[[], Any]] = dict(factory) if self.are_several else {None: factory}
        self._standalone, self._seconds = list(tools), seconds
        self._pools: dict[str | None, list[_Instance]] = defaultdict(list)
        self._kits: dict[str | None, dict[str, Callable[..., Any]]] = {}
        """The tools of each environment, by their names; methods are those of the class."""
        self.prompts_are_empty = False
        """Whether the dataset has no prompts, so that `reset` gets none."""
        self._now: list[tuple[str | None, _Instance]] = []
        for name, make in self._factories.items():
            self._examine(name, make)

    # ---- What they are ----------------------------------------------------------------------------------------------

    def _examine(self, name: str | None, make: Callable[[], Any]) -> None:
        called = "`environment_factory`" if name is None else f"`environment_factory[{name!r}]`"
        instance = _Instance(make)
        (error,) = waited([instance.start(instance.make)], self._seconds)
        if isinstance(error, BaseException):
            raise RuntimeError(f"{called} could not make an environment: {_in_words(error)}") from error
        kind = type(instance.it)
        # On the class: reading attributes of the object would run its properties.
        methods = dict(inspect.getmembers(kind, inspect.isfunction))
        if "reset" not in methods:
            raise ValueError(
                f"{called} makes a {kind.__name__}, which has no method `reset`: expected a function that returns an "
                "object with `reset(**row)`, whose other public methods are its tools (docs/agents.md)."
            )
        own = {key: getattr(instance.it, key) for key in methods if not (key.startswith("_") or key in _OURS)}
        self._kits[name] = {**{one.__name__: one for one in self._standalone}, **own}
        self._pools[name].append(instance)

    @property
    def kinds(self) -> dict[str | None, type]:
        """The class of each, by the column `environment`."""
        return {name: type(pool[0].it) for name, pool in self._pools.items()}

    @property
    def names(self) -> frozenset[str]:
        """Those that a row may name; empty for a single environment."""
        return frozenset(filter(None, self._factories)) if self.are_several else frozenset()

    @property
    def tells(self) -> bool:
        """Whether any of them gives a teacher what the student does not read."""
        told = ("get_privileged_context", "get_feedback")
        return any(hasattr(kind, method) for kind in self.kinds.values() for method in told)

    @property
    def sources(self) -> dict[str, Any]:
        """The classes, by their names in messages."""
        return {f"environment {kind.__qualname__}": kind for kind in self.kinds.values()}

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All tools of all environments, as templates describe them: none is to be awaited."""
        return list({id(one): as_described(one) for name in self._kits for one in self._kits[name].values()}.values())

    def tools_of(self, name: str | None) -> list[Callable[..., Any]]:
        """Those of one environment."""
        return list(map(as_described, self._kits[name].values()))

    @property
    def rewards(self) -> dict[str, Callable[..., Any]]:
        """A reward function for each class that has `get_reward`, by its name."""
        kinds = dict.fromkeys(kind for kind in self.kinds.values() if hasattr(kind, "get_reward"))
        return {kind.__name__: functools.partial(self._reward, kind) for kind in kinds}

    # ---- The episodes of a batch ------------------------------------------------------------------------------------

    @property
    def current(self) -> list[Any]:
        """The environment of each row of the batch."""
        return [instance.it for _, instance in self._now]

    def begin(self, rows: Sequence[Mapping[str, Any]], batch: str) -> list[dict[str, Any]]:
        """Resets an environment for each row; the rows with observations, and with what only a teacher may read.

        Raises:
            RuntimeError: An environment could not be made or reset, or not in time.
        """
        taken: Counter[str | None] = Counter()
        self._now = []
        for number, row in enumerate(rows):
            name = row.get("environment") if self.are_several else None
            if name not in self._factories:
                raise ValueError(f"Row {number} of {batch} names no environment in its column 'environment'.")
            pool, place = self._pools[name], taken[name]
            taken[name] += 1
            if place == len(pool):
                pool.append(_Instance(self._factories[name]))
            elif pool[place].is_lost:
                pool[place] = _Instance(self._factories[name])
            self._now.append((name, pool[place]))
        hidden = {*(("environment",) if self.are_several else ()), *(("prompt",) if self.prompts_are_empty else ())}
        found = self._together(
            [
                functools.partial(instance.begin, {key: value for key, value in row.items() if key not in hidden})
                for row, (_, instance) in zip(rows, self._now, strict=True)
            ]
        )
        for number, error in enumerate(found):
            if isinstance(error, BaseException):
                where = f"row {number} of {batch}"
                raise RuntimeError(f"The environment of {where} could not begin: {_in_words(error)}") from error
        return [self._told(row, *told) for row, told in zip(rows, found, strict=True)]

    def _told(self, row: Mapping[str, Any], observation: Any, context: Any) -> dict[str, Any]:
        """A row after the reset of its environment, as TRL joins them."""
        told = dict(row)
        if observation is not None:
            if isinstance(row["prompt"], str):
                raise ValueError(f"The prompt {row['prompt'][:40]!r} is text, but environments need messages.")
            *before, last = row["prompt"]
            content = last["content"]
            if isinstance(observation, list) and isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if isinstance(observation, str) and isinstance(content, list):
                observation = [{"type": "text", "text": observation}]
            told["prompt"] = [*before, {**last, "content": content + observation}]
        return told if context is None else {**told, "privileged_context": context}

    def name(self, number: int) -> str | None:
        """The name of a row's environment."""
        return self._now[number][0]

    def call(self, calls: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, list[Called] | None]:
        """The answers to the calls of a turn, by the number of the row; `None` where they did not come in time.

        Calls of one row follow each other; those of different rows do not wait for each other.
        """
        found = self._together(
            [functools.partial(answers, self._bound(number), calls[number]) for number in calls],
            [self._now[number][1] for number in calls],
        )
        return {
            number: None if isinstance(one, BaseException) else one for number, one in zip(calls, found, strict=True)
        }

    def _bound(self, number: int) -> dict[str, Callable[..., Any]]:
        """The tools of a row: methods of its own environment."""
        name, instance = self._now[number]
        standalone = {one.__name__ for one in self._standalone}
        return {
            key: tool if key in standalone and not hasattr(type(instance.it), key) else getattr(instance.it, key)
            for key, tool in self._kits[name].items()
        }

    def feedback(self, rows: Sequence[int] | None = None) -> list[Any]:
        """What environments say of the episodes of these rows, or of all.

        `None` of one that says nothing, or did not in time.
        """
        numbers = range(len(self._now)) if rows is None else rows
        instances = [self._now[number][1] for number in numbers]
        found = self._together([_job(getattr(one.it, "get_feedback", None)) for one in instances], instances)
        for number, error in zip(numbers, found, strict=True):
            if isinstance(error, BaseException):
                logger.warning(f"`get_feedback` of the environment of row {number} failed: {_in_words(error)}")
        return [None if isinstance(one, BaseException) else one for one in found]

    def _reward(self, kind: type[Any], *, environments: Sequence[Any], **_: Any) -> list[Any]:
        """The reward of each environment of a class; `None` of the others, and of one that was lost."""
        jobs = [_job(one.get_reward if type(one) is kind else None) for one in environments]
        instances = {id(instance.it): instance for _, instance in self._now}
        found = self._together(jobs, [instances[id(one)] for one in environments])
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, Late):
                raise one
        return [None if isinstance(one, Late) else one for one in found]

    def _together(
        self, jobs: Sequence[Callable[[Wait], Any] | None], instances: Sequence[_Instance] | None = None
    ) -> list[Any]:
        """The result or exception of each job, all in their environments' threads; [`Late`] of one that is late."""
        instances = instances or [instance for _, instance in self._now]
        futures = [None if job is None else one.start(job) for job, one in zip(jobs, instances, strict=True)]
        found = waited(futures, self._seconds)
        for number, (job, instance) in enumerate(zip(jobs, instances, strict=True)):
            if job is not None and instance.is_lost:
                found[number] = Late("it did not answer before")
            elif isinstance(found[number], Late):
                instance.is_lost = True
                logger.warning(f"An environment gave {found[number]} (`environment_timeout`), and is made anew.")
        return found


def _nothing() -> None:
    """What an environment without a method says."""


def _job(method: Callable[[], Any] | None) -> Callable[[Wait], Any] | None:
    return None if method is None else lambda wait: wait(method())


def answers(tools: Mapping[str, Callable[..., Any]], calls: Sequence[Mapping[str, Any]], wait: Wait) -> list[Called]:
    """What tools answer to calls; a call that fails is answered with the error, as in TRL."""
    found = []
    for call in calls:
        if call["type"] != "function":
            name, kind = call.get("name", "unknown"), call["type"]
            found.append(Called(name, str({"error": f"Unsupported tool call type: {kind}"}), failed=True))
            continue
        name = call["function"]["name"]
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            answer = wait(tools[name](**call["function"]["arguments"]))
            # Text that UTF-8 cannot encode, which no tokenizer reads, has question marks in its place.
            text = answer if _is_content(answer) else str(answer).encode(errors="replace").decode()
            found.append(Called(name, text))
        except (Exception, SystemExit) as error:
            found.append(Called(name, str({"error": str(error)}), failed=True))
    return found


def _is_content(answer: Any) -> bool:
    """Whether it is the content of a message in parts; TRL takes any list for that."""
    return isinstance(answer, list) and all(
        isinstance(part, Mapping) and part.get("type") in ("text", "image") for part in answer
    )


def as_described(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A tool as a template describes it: TRL's constructor refuses those that are to be awaited."""
    if not inspect.iscoroutinefunction(tool):
        return tool

    @functools.wraps(tool)
    def described(*args: Any, **kwargs: Any) -> Any:
        return tool(*args, **kwargs)

    return described


def check_factory(factory: Any) -> None:
    """Refuses what makes no environments (`TypeError`, `ValueError`), before anything is made."""
    if isinstance(factory, Mapping):
        if not factory:
            raise ValueError("`environment_factory` is an empty dict: pass a function for each environment.")
        if odd := [name for name in factory if not isinstance(name, str)]:
            raise TypeError(
                f"`environment_factory` has the key {odd[0]!r}: expected names, of the column 'environment'."
            )
    for called, make in (
        {f"environment_factory[{name!r}]": make for name, make in factory.items()}
        if isinstance(factory, Mapping)
        else {"environment_factory": factory}
    ).items():
        if not callable(make):
            raise TypeError(f"`{called}` is a {type(make).__name__}: expected a class or a function without arguments.")
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise TypeError(
                f"`{called}` cannot be called without arguments ({error}): pass a function that needs none, such as "
                "`functools.partial(Environment, ...)`."
            ) from None
        except ValueError:  # builtins may have no signature
            continue


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, Late) else f"{type(error).__name__}: {error}"
