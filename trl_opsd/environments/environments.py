"""The environments of a trainer: made once, reset for each row; they provide tools, rewards and what teachers read."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from accelerate.logging import get_logger
from accelerate.utils import set_seed

from trl_opsd.data.prompts import tells_more
from trl_opsd.environments.worker import Late, Wait, Worker, waited

logger = get_logger(__name__)

RESERVED_METHODS = ("reset", "get_reward", "get_privileged_context", "get_feedback")
"""Methods that are no tools."""
EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a row that has none, to which the environment adds its observation."""

Tools: TypeAlias = Mapping[str, Callable[..., Any]]
Calls: TypeAlias = Sequence[Mapping[str, Any]]
"""The calls of a turn, as a template parses them."""


@dataclass(frozen=True, slots=True)
class Called:
    """What a tool answered."""

    name: str
    content: str
    failed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What one factory makes."""

    make: Callable[[], Any]
    of: type[Any]
    methods: frozenset[str]
    """Of the class: looking at an object would run its properties, or ask a proxy."""
    tools: Tools
    """As templates describe them: none is to be awaited."""
    own: Mapping[str, str]
    """The attribute of each that is a method: a decorator may have given it another name."""
    standalone: Tools
    """The others, as they were passed."""
    pool: list[Episode] = field(default_factory=list)

    def episode(self, place: int) -> Episode:
        """One of the pool; a new one at its end, or in place of one that was lost."""
        if place == len(self.pool) or self.pool[place].is_lost:
            self.pool[place : place + 1] = [Episode(self)]
        return self.pool[place]


@final
class Episode:
    """The environment of a row, made and called in its own thread."""

    def __init__(self, kind: Kind, environment: Any = None, worker: Worker | None = None) -> None:
        self.kind, self.environment, self._worker = kind, environment, worker or Worker()
        self.is_lost = False
        """Whether a call did not return in time, or another batch began before it did."""

    def start(self, job: Callable[[Wait], Any] | None) -> Future[Any] | None:
        return None if job is None or self.is_lost else self._worker.start(job)

    def begin(self, row: Mapping[str, Any], wait: Wait) -> tuple[Any, str | None]:
        """The observation at the start, and what only the teacher may read."""
        if self.environment is None:
            self.environment = self.kind.make()
        observation = wait(self.environment.reset(**row))
        if isinstance(observation, str):
            observation = _clean(observation)
        return observation, self._told("get_privileged_context", wait)

    def answer(self, calls: Calls, wait: Wait) -> list[Called]:
        """The answers to the calls of a turn."""
        own = {name: getattr(self.environment, key) for name, key in self.kind.own.items()}
        return answers({**self.kind.standalone, **own}, calls, wait)

    def feedback(self, wait: Wait) -> str | None:
        """What there is to say after the episode."""
        return self._told("get_feedback", wait)

    def reward(self, wait: Wait) -> Any:
        return wait(self.environment.get_reward())

    def _told(self, method: str, wait: Wait) -> str | None:
        said = wait(getattr(self.environment, method)()) if method in self.kind.methods else None
        return _clean(said) if said and said.strip() else None


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
    """

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any]], seconds: float | None) -> None:
        self.are_several, self._seconds = isinstance(factory, Mapping), seconds
        factories: dict[str | None, Callable[[], Any]] = dict(factory) if self.are_several else {None: factory}
        self._kinds = {name: self._examined(name, make, tools) for name, make in factories.items()}
        self.episodes: list[Episode] = []
        """Those of the rows of the batch."""

    # ---- What they are ----------------------------------------------------------------------------------------------

    def _examined(self, name: str | None, make: Callable[[], Any], tools: Sequence[Callable[..., Any]]) -> Kind:
        called = "`environment_factory`" if name is None else f"`environment_factory[{name!r}]`"
        worker = Worker()
        (it,) = waited([worker.start(lambda _: make())], self._seconds)
        if isinstance(it, BaseException):
            raise RuntimeError(f"{called} could not make an environment: {_in_words(it)}") from it
        methods = dict(inspect.getmembers(type(it), lambda one: inspect.isfunction(one) or inspect.ismethod(one)))
        own = {key: getattr(it, key) for key in methods if not (key.startswith("_") or key in RESERVED_METHODS)}
        lacking = [name for name in RESERVED_METHODS if name not in methods]
        if near := [key for key in own if difflib.get_close_matches(key, lacking, n=1, cutoff=0.85)]:
            raise ValueError(
                f"`{type(it).__name__}.{near[0]}` would be a tool of the student, and nearly has the name of a hook "
                f"({', '.join(lacking)}): correct the name, or begin it with an underscore if it is neither."
            )
        given = {one.__name__: one for one in tools}
        described = {one.__name__: as_described(one) for one in (*tools, *own.values())}
        names = {one.__name__: key for key, one in own.items()}
        kind = Kind(make, type(it), frozenset(methods), described, names, given)
        kind.pool.append(Episode(kind, it, worker))
        return kind

    @property
    def names(self) -> frozenset[str]:
        """Those that a row may name; empty for a single environment."""
        return frozenset(filter(None, self._kinds)) if self.are_several else frozenset()

    @property
    def tells(self) -> bool:
        """Whether any of them gives a teacher what the student does not read."""
        return any(kind.methods & {"get_privileged_context", "get_feedback"} for kind in self._kinds.values())

    @property
    def sources(self) -> dict[str, Any]:
        """The classes, by their names in messages."""
        return {f"environment {name or kind.of.__qualname__}": kind.of for name, kind in self._kinds.items()}

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All tools of all environments."""
        return list({id(one): one for kind in self._kinds.values() for one in kind.tools.values()}.values())

    def tools_of(self, name: str) -> list[Callable[..., Any]]:
        """Those of one of several environments."""
        return list(self._kinds[name].tools.values())

    def rewards(self, taken: Collection[str]) -> dict[str, Callable[..., Any]]:
        """A reward function for each class that has `get_reward`, by its name in the log, none of those `taken`."""
        found: dict[str, Callable[..., Any]] = {}
        for of in dict.fromkeys(kind.of for kind in self._kinds.values() if "get_reward" in kind.methods):
            names = (f"{of.__name__}_{number}" if number > 1 else of.__name__ for number in itertools.count(1))
            name = next(name for name in names if name not in {*taken, *found})
            found[name] = functools.partial(self._reward, of)
        return found

    # ---- The episodes of a batch ------------------------------------------------------------------------------------

    @property
    def current(self) -> list[Any]:
        """The environment of each row of the batch."""
        return [episode.environment for episode in self.episodes]

    def begin(self, rows: Sequence[Mapping[str, Any]], batch: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Resets an environment for each row; the rows with observations, and with what only a teacher may read.

        A `reset` with a parameter `seed` is given that of its row. Of others, those of rows without columns, which do
        not say what the task is, follow each other, with the random numbers of the program seeded by it.

        Raises:
            RuntimeError: An environment could not be made or reset, or not in time.
        """
        taken: Counter[str | None] = Counter()
        self.episodes, jobs, drawing = [], [], list[int]()
        for number, row in enumerate(rows):
            if self.tells and tells_more(row):
                raise ValueError(f"Row {number} of {batch} has context for the teacher, as environments do: remove it.")
            given = dict(row)
            name = given.pop("environment") if self.are_several else None
            self.episodes.append(self._kinds[name].episode(taken[name]))
            taken[name] += 1
            if given.get("prompt", EMPTY_PROMPT) == EMPTY_PROMPT:
                given.pop("prompt", None)
            if "seed" in inspect.signature(self._kinds[name].of.reset).parameters:
                given = {"seed": seeds[number], **given}
            elif not given.keys() - {"prompt"}:
                drawing.append(number)
            jobs.append(functools.partial(self.episodes[-1].begin, given))
        set_seed(seeds[0])
        found = self._together(self.episodes, [None if one in drawing else job for one, job in enumerate(jobs)])
        for number in drawing:
            set_seed(seeds[number])
            (found[number],) = self._together([self.episodes[number]], [jobs[number]])
            if isinstance(found[number], BaseException):
                break
        for number, error in enumerate(found):
            if isinstance(error, BaseException):
                where = f"row {number} of {batch}"
                raise RuntimeError(f"The environment of {where} could not begin: {_in_words(error)}") from error
        return [_told(row, *one) for row, one in zip(rows, found, strict=True)]

    def call(self, episodes: Sequence[Episode], calls: Sequence[Calls]) -> list[list[Called] | None]:
        """The answers to the calls of a turn, of each episode; `None` where they did not come in time.

        Calls of one row follow each other; those of different rows do not wait for each other.
        """
        jobs = [functools.partial(one.answer, some) for one, some in zip(episodes, calls, strict=True)]
        return self._or_none(self._together(episodes, jobs), "A tool call failed, which ends the episode")

    def feedback(self, episodes: Sequence[Episode]) -> list[str | None]:
        """What environments say after their episodes; `None` of one that says nothing, or did not in time."""
        found = self._together(episodes, [one.feedback for one in episodes])
        return self._or_none(found, "`get_feedback` of an environment failed, so teachers get none")

    @staticmethod
    def _or_none(found: Sequence[Any], failure: str) -> list[Any]:
        """Results, and `None` for exceptions; warns of those that were not late."""
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, Late):
                logger.warning(f"{failure}: {_in_words(error)}")
        return [None if isinstance(one, BaseException) else one for one in found]

    def _reward(self, of: type[Any], /, *, environments: Sequence[Any], **_: Any) -> list[Any]:
        """The reward of each environment of a class; `None` of the others, and of one that was lost."""
        known = {id(one.environment): one for one in self.episodes}
        episodes = [known[id(one)] for one in environments]
        found = self._together(episodes, [one.reward if one.kind.of is of else None for one in episodes])
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, Late):
                raise RuntimeError(_in_words(one)) from one
        return [None if isinstance(one, Late) else one for one in found]

    def _together(self, episodes: Sequence[Episode], jobs: Sequence[Callable[[Wait], Any] | None]) -> list[Any]:
        """The result or exception of each job, all in their environments' threads; [`Late`] of one that is late."""
        found = waited([one.start(job) for one, job in zip(episodes, jobs, strict=True)], self._seconds)
        for number, (job, episode) in enumerate(zip(jobs, episodes, strict=True)):
            if job is not None and episode.is_lost:
                found[number] = Late("it did not answer before")
            elif isinstance(found[number], Late):
                episode.is_lost = True
                logger.warning(f"An environment gave {found[number]} (`environment_timeout`), and is made anew.")
        return found


def answers(tools: Tools, calls: Calls, wait: Wait) -> list[Called]:
    """What tools answer to calls; a call that fails is answered with the error, as in TRL."""
    found = []
    for call in calls:
        function = call["function"]
        name = _clean(str(function.get("name", "unknown")))
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            arguments = copy.deepcopy(function["arguments"])  # which a tool may change
            found.append(Called(name, _content(wait(tools[name](**arguments)))))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also `SystemExit`, and what is cancelled
            found.append(Called(name, _clean(str({"error": str(error)})), failed=True))
    return found


def _content(answer: Any) -> str:
    """The content of a message: the text in its parts, or the `str` of anything else."""
    if isinstance(answer, list) and any(_type(part) == "image" for part in answer):
        raise TypeError("This tool returned an image, which completions cannot have.")
    return _clean(str(_plain(answer)))


def _plain(content: Any) -> Any:
    """The text of a list of parts of text; anything else as it is."""
    if not (isinstance(content, list) and content and all(_type(part) == "text" for part in content)):
        return content
    return "".join(str(part.get("text")) for part in content)


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _clean(text: str) -> str:
    """Text that tokenizers read: what UTF-8 cannot encode is a question mark, and there are no null characters."""
    return text.encode(errors="replace").decode().replace("\0", "")


def _told(row: Mapping[str, Any], observation: Any, context: str | None) -> dict[str, Any]:
    """A row after the reset of its environment, as TRL joins them."""
    told = {"prompt": EMPTY_PROMPT, **row}
    if observation is not None:
        *before, last = told["prompt"]
        content = last["content"]
        observation = _plain(observation) if isinstance(content, str) else observation
        if isinstance(content, str) != isinstance(observation, str):
            content, observation = _parts(content), _parts(observation)
        told["prompt"] = [*before, {**last, "content": content + observation}]
    return told if context is None else {**told, "privileged_context": context}


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_described(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A tool as a template describes it: TRL's constructor refuses those that are to be awaited."""
    if not inspect.iscoroutinefunction(tool):
        return tool

    @functools.wraps(tool)
    def described(*args: Any, **kwargs: Any) -> Any:
        return tool(*args, **kwargs)

    return described


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, Late) else f"{type(error).__name__}: {error}"
