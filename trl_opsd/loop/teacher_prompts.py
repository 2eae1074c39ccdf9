"""What teachers read before the completions of a batch, once these are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate.logging import get_logger

from trl_opsd.data.prompts import Prompt
from trl_opsd.data.readers import Readers
from trl_opsd.methods.rows import BatchRow
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import images_of

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)


class TeacherPrompts:
    """The prompts of teachers: from the columns, or those that methods put in their place.

    A row whose teacher has no prompt gets a gate of 0, and its teacher reads that of the columns.
    """

    def __init__(self, host: OPSDTrainer) -> None:
        self._host = host

    @property
    def _readers(self) -> Readers:
        return self._host.teaching.readers

    def own(self, rows: Sequence[BatchRow], completions: Sequence[list[int]]) -> list[Prompt]:
        """The prompts of the rows' teachers after these completions."""
        if not self._readers.intake.rewrites:
            return [row.request.of_teacher for row in rows]
        texts, rewritten = self._host.processing_class.batch_decode(completions, skip_special_tokens=True), []
        for row, text in zip(rows, texts, strict=True):
            prompt: Prompt | None = row.request.of_teacher
            if row.prompt_weight:
                prompt = self._host.methods.teacher_prompt(row, text, row.request.of_teacher)
            row.gate *= float(prompt is not None)
            rewritten.append(row.request.of_teacher if prompt is None else prompt)
        return rewritten

    def read(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Rollout:
        """The same completions, token by token, after the prompts of their teachers."""
        prompts = self._token_ids(rollout, rows)
        return rollout if prompts is None else rollout.after(self._host.pad_prompts(prompts), images_of(prompts))

    def contrasts(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Rollout:
        """The same completions after the prompts of their contrasts."""
        reader, prompts = self._readers.teacher, [row.contrast for row in rows if row.contrast is not None]
        reader.check_kind(prompts)
        prompt_ids = reader.token_ids(prompts)
        self.check_fit(rows, prompt_ids, rollout)
        return rollout.after(self._host.pad_prompts(prompt_ids), images_of(prompt_ids))

    def check_fit(self, rows: Sequence[BatchRow], prompt_ids: Sequence[list[int]], rollout: Rollout) -> None:
        """Raises `ValueError` where a prompt and its completion exceed the context of the row's teacher."""
        of_teachers = self._readers.teacher_limits
        for row, ids, completion in zip(rows, prompt_ids, rollout.completion_lists(), strict=True):
            # The completion is known by now, so no more room has to be kept for it.
            limits = replace(of_teachers[row.request.teacher], completion=len(completion))
            limits.check(len(ids), max(ids, default=0), f"The teacher's prompt for {row.request.where}")

    def _token_ids(self, rollout: Rollout, rows: Sequence[BatchRow]) -> list[list[int]] | None:
        """The teachers' prompts as token ids; `None` if they are the student's prompts."""
        readers, intake = self._readers, self._readers.intake
        prompt_ids = rollout.prompt_lists()
        # Where no row differs, the student's token ids are reused and nothing is tokenized again.
        alike = not (readers.template or intake.rewrites or readers.tokenizers)
        alike = alike and all(row.request.of_teacher is row.request.student for row in rows)
        if not alike:
            completions = rollout.completion_lists() if intake.rewrites else ()  # these wait for the device
            prompts, reader = self.own(rows, completions), readers.teacher
            prompts = [reader.read_by(row.request.teacher, one) for row, one in zip(rows, prompts, strict=True)]
            if reader.check_kind(prompts) == "text" and rows[0].request.student.kind == "messages":
                logger.warning_once(
                    "The prompts are text for the teacher but messages for the student, so no chat template is applied "
                    "to the teacher's. If the teacher is a chat model, give it messages, too."
                )
            prompt_ids = reader.token_ids(prompts)
            if self._host.methods.any("falls_back") or intake.is_told:
                prompt_ids = self._where_they_fit(rows, prompt_ids, rollout)
        self.check_fit(rows, prompt_ids, rollout)
        return None if alike else prompt_ids

    def _where_they_fit(
        self, rows: Sequence[BatchRow], prompt_ids: Sequence[list[int]], rollout: Rollout
    ) -> list[list[int]]:
        """The prompts, without what exceeds the context of the row's teacher."""
        found, reader = [], self._readers.teacher
        for row, ids, completion in zip(rows, prompt_ids, rollout.completion_lists(), strict=True):
            context = self._readers.teacher_limits[row.request.teacher].context
            if context is not None and len(ids) + len(completion) > context:
                (ids,) = reader.token_ids([reader.read_by(row.request.teacher, self._shortened(row))])
            found.append(ids)
        return found

    def _shortened(self, row: BatchRow) -> Prompt:
        """The teacher's prompt where the text beside the columns leaves no room."""
        request, intake = row.request, self._readers.intake
        if not intake.is_told:
            row.gate *= float(request.tells_more)
            return request.of_teacher
        logger.warning_once(f"The environment's text in {request.where} exceeds the teacher's context: left out.")
        row.request = replace(request, of_teacher=request.student)
        row.gate *= float(not intake.needs_context)
        return request.student
