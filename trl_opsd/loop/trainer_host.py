"""The trainer as the objects of its loop see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from trl_opsd.data.pictures import Pictures
from trl_opsd.data.prompts import Prompt, Row
from trl_opsd.data.readers import PromptLimits, Readers
from trl_opsd.environments import Environments
from trl_opsd.host import Host
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.order import Methods
from trl_opsd.methods.rows import BatchRow, Written
from trl_opsd.models.padding import Reading
from trl_opsd.parallel.prefetch import Closable
from trl_opsd.teacher.teachers import Teachers
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.rollout import PromptIds


class TeachingHost(Protocol):
    """What other objects of the loop ask of `Teaching`."""

    teachers: Teachers
    readers: Readers
    vocabulary: int | None
    spelling: Any
    names: tuple[str, ...]
    logs_rewards: bool
    first_made: Any
    steps_ahead: int
    prompts: Any

    @property
    def batch_name(self) -> str: ...
    @property
    def begins_early(self) -> bool: ...

    def as_writer(self, teacher: Any, limits: PromptLimits) -> tuple[Any, PromptLimits, Any]: ...
    def read_rows(self, rows: Sequence[Row]) -> list[BatchRow]: ...
    def as_rows(self, rows: Sequence[Row]) -> list[BatchRow]: ...
    def rows_of(self, batch: Mapping[str, Any], rollout: Rollout) -> list[BatchRow]: ...
    def expect(self, rollout: Rollout, rows: Sequence[BatchRow]) -> None: ...


class TurnsHost(Protocol):
    """What they ask of `Turns`."""

    environments: Environments | None
    ended: dict[int, Any]
    counts: list[tuple[int, int, int]]

    @property
    def are_apart(self) -> bool: ...

    def first(self, prompt_ids: list[list[int]]) -> list[list[int]]: ...
    def run(self, prompt_ids: list[list[int]], completions: list[list[int]]) -> Written: ...
    def stream(self, prompt_ids: list[list[int]]) -> Closable[tuple[int, list[int]]]: ...
    def tell(self, number: int, row: BatchRow) -> None: ...
    def end(self, rows: Sequence[BatchRow]) -> None: ...


class TrainerHost(Host, Protocol):
    """The trainer, as the objects of its loop see it: what a subclass may override is called here, never around it."""

    model_wrapped: Any
    optimizer: Any
    _metrics: Any
    lr_scheduler: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    chat_template_kwargs: dict[str, Any]
    tools: Any
    divergence: Any
    temperature: float
    train_dataset: Any
    eval_dataset: Any
    dropped_prompts: Counter[str]
    base_samples: Any
    row_group: Any
    teaching: TeachingHost
    methods: Methods
    turns: TurnsHost
    pictures: Pictures
    max_tool_calling_iterations: int
    log_completions: bool
    reads_solutions: bool

    @property
    def reading_to_learn(self) -> Reading: ...
    @property
    def current_objective(self) -> Objective: ...
    @property
    def temperatures(self) -> tuple[float, float]: ...
    @property
    def distinct_rows(self) -> int | None: ...

    def begin_batch(self, inputs: list[dict[str, Any]]) -> list[BatchRow]: ...

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]: ...
    def teach(self, rollout: Rollout, rows: Sequence[Row]) -> TeacherTargets: ...
    def weigh(self, rollout: Rollout, rows: Sequence[Row], targets: TeacherTargets) -> Tensor: ...

    def tokenize(self, prompts: list[Any], environment: str = "", **chat_template_kwargs: Any) -> list[list[int]]: ...
    def tokenize_with_images(self, prompt: Prompt, **chat_template_kwargs: Any) -> PromptIds: ...
    def prompt_ids_of(self, rows: Sequence[BatchRow]) -> list[list[int]]: ...
    def given_completion(self, row: BatchRow, prompt_ids: list[int]) -> list[int]: ...
    def padded(
        self,
        prompt_ids: Sequence[list[int]],
        completions: Sequence[list[int]],
        masks: Sequence[list[int]] | None = None,
    ) -> dict[str, Tensor]: ...
    def in_student(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def gather_distinct_rows(self, rows: Tensor) -> Tensor: ...
    def explain_memory(self, error: Exception, phase: str) -> None: ...
    def add_callback(self, callback: Any) -> None: ...
