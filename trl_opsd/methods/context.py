"""What a teacher reads once a completion is known: what a function makes of it, or a success of the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, final

from trl_opsd.data.outcomes import reads_outcome
from trl_opsd.data.prompts import SUCCESS_TEMPLATE, check_template
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.options.normalize import with_help
from trl_opsd.options.table import NUMBER, Option, one_of


@with_help
@dataclass
class ContextOptions:
    teacher_context: Annotated[str | None, Option(one_of(None, "group_success"), resumed=True)] = None
    """What the teacher reads beside the columns: `"group_success"`, another completion of the same prompt whose reward
    is high enough (SDPO, arXiv 2601.20802); a row without one, and without context in the columns, does not count."""
    success_threshold: Annotated[float, Option(NUMBER, resumed=True)] = 1.0
    """Minimum reward for a completion to be shown to the teacher as a success."""
    feedback_template: Annotated[str, Option(partial(check_template, names=("feedback",)), resumed=True)] = (
        "Feedback on an earlier attempt:\n\n{feedback}"
    )
    """Template, in the teacher's prompt, of what an environment's `get_feedback` returns."""


@final
class GroupSuccess(Method):
    """Shows the teacher another completion of the same prompt that was rewarded."""

    reads_outcomes = needs_rewards = in_groups = falls_back = True
    whole_rows = False

    @classmethod
    def of(cls, now: Any) -> GroupSuccess | None:
        return cls() if now.teacher_context is not None and now.teacher_prompt_fn is None else None

    def teacher_prompt(self, row: BatchRow, completion_text: str, prompt: Any) -> Any:
        request, outcome = row.request, row.outcome
        solution = None if outcome is None else outcome.success(self.host.args.success_threshold)
        if solution is None:
            return prompt if request.tells_more else None
        intake = self.host.teaching.readers.intake
        return intake.with_context(request["prompt"], solution, request.where, SUCCESS_TEMPLATE)


@final
class PromptFunction(Method):
    """Has a function of the user make the teacher's prompt of a row and its completion."""

    whole_rows = False

    def __init__(self, function: Any) -> None:
        self._function = function
        self.reads_outcomes = self.needs_rewards = reads_outcome(function)

    @classmethod
    def of(cls, now: Any) -> PromptFunction | None:
        return None if now.teacher_prompt_fn is None else cls(now.teacher_prompt_fn)

    def teacher_prompt(self, row: BatchRow, completion_text: str, prompt: Any) -> Any:
        request = row.request
        try:
            found = self._function(dict(request), completion_text, *([row.outcome] if self.reads_outcomes else ()))
        except Exception as error:
            # The user's own exception goes on, with the row named.
            columns = sorted(request)
            error.add_note(f"`teacher_prompt_fn` raised this for {request.where}, which has the columns {columns}.")
            raise
        intake = self.host.teaching.readers.intake
        if found is None and self.reads_outcomes:
            return None
        return intake.prompt_of(request, found, f"What `teacher_prompt_fn` returned for {request.where}")
