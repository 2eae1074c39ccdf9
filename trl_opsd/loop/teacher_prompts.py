"""What teachers read before the completions of a batch, once these are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelerate.logging import get_logger
from accelerate.utils import gather_object

from trl_opsd.data.datasets import comparable
from trl_opsd.data.prompts import Prompt
from trl_opsd.data.readers import Readers
from trl_opsd.loop.rows import BatchRow
from trl_opsd.loop.trainer_host import TrainerHost
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import images_of

logger = get_logger(__name__)


class TeacherPrompts:
    """The prompts of teachers: from the columns, a function or a success, or those that a control puts in their place.

    A row whose teacher has no prompt gets a gate of 0, and its teacher reads that of the columns.
    """

    def __init__(self, host: TrainerHost) -> None:
        self._host = host

    @property
    def _readers(self) -> Readers:
        return self._host.teaching.readers

    def own(self, row: BatchRow, completion_text: str) -> Prompt:
        """The prompt of a row's teacher after this completion."""
        if not row.prompt_weight:
            return row.request.of_teacher
        return self._or_none(row, self._readers.intake.after(row.request, completion_text, row.outcome))

    def _or_none(self, row: BatchRow, prompt: Prompt | None) -> Prompt:
        row.gate *= float(prompt is not None)
        return row.request.of_teacher if prompt is None else prompt

    def read(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Rollout:
        """The same completions, token by token, after the prompts of their teachers."""
        prompts = self._of_control(self._token_ids(rollout, rows), rows)
        return rollout if prompts is None else rollout.after(self._host.pad_prompts(prompts), images_of(prompts))

    def contrasts(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Rollout:
        """The same completions after the prompts of their contrasts."""
        reader, prompts = self._readers.teacher, [row.contrast for row in rows if row.contrast is not None]
        reader.check_kind(prompts)
        prompt_ids = reader.token_ids(prompts)
        self.check_fit(rows, prompt_ids, rollout)
        return rollout.after(self._host.pad_prompts(prompt_ids), images_of(prompt_ids))

    def check_fit(
        self, rows: Sequence[BatchRow], prompt_ids: Sequence[list[int]], rollout: Rollout, teacher: str | None = None
    ) -> None:
        """Raises `ValueError` where a prompt and its completion exceed the context of the row's teacher, or of this."""
        lengths = list(map(len, rollout.completion_lists()))
        self._readers.check_fits_teacher([row.request for row in rows], prompt_ids, lengths, teacher)

    def _token_ids(self, rollout: Rollout, rows: Sequence[BatchRow]) -> list[list[int]] | None:
        """The teachers' prompts as token ids; `None` if they are the student's prompts."""
        readers, intake = self._readers, self._readers.intake
        prompt_ids = rollout.prompt_lists()
        # Where no row differs, the student's token ids are reused and nothing is tokenized again.
        alike = not (readers.template or intake.reads_completions or readers.tokenizers)
        alike = alike and all((row.control or row.request.of_teacher) is row.request.student for row in rows)
        if not alike:
            prompts = [row.control or row.request.of_teacher for row in rows]
            if intake.reads_completions:
                texts = self._host.processing_class.batch_decode(rollout.completion_lists(), skip_special_tokens=True)
                prompts = [row.control or self.own(row, text) for row, text in zip(rows, texts, strict=True)]
            reader = readers.teacher
            prompts = [reader.read_by(row.request.teacher, one) for row, one in zip(rows, prompts, strict=True)]
            if reader.check_kind(prompts) == "text" and rows[0].request.student.kind == "messages":
                logger.warning_once(
                    "The prompts are text for the teacher but messages for the student, so no chat template is applied "
                    "to the teacher's. If the teacher is a chat model, give it messages, too."
                )
            prompt_ids = reader.token_ids(prompts)
            if intake.success is not None or intake.is_told:
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
        """The teacher's prompt where what it is told beside the columns leaves no room."""
        request, intake = row.request, self._readers.intake
        if row.control is not None:
            row.gate = 0.0
            return request.student
        if not intake.is_told:
            return self._or_none(row, request.of_teacher if request.tells_more else None)
        logger.warning_once(f"What the environment of {request.where} tells its teacher leaves no room in its context.")
        row.request = replace(request, of_teacher=request.student)
        row.gate *= float(not intake.needs_context)
        return request.student

    # ---- Controls -----------------------------------------------------------------------------------------------

    def _of_control(self, prompts: list[list[int]] | None, rows: Sequence[BatchRow]) -> list[list[int]] | None:
        """The teachers' prompts, or those that `teacher_control` puts in their place."""
        control = self._host.args.teacher_control
        if not self._host.model.training:  # evaluations compare with the teacher that it controls for
            return prompts
        if control == "shuffled" and any(row.control is None for row in rows):
            raise ValueError(
                "`teacher_control='shuffled'` with a batch whose rows come from no dataset: pass the result of "
                "`trainer._generate_and_score_completions(rows)`."
            )
        if control != "unprivileged":
            return prompts
        if any(self._readers.intake.processors) or self._readers.tokenizers:
            raise ValueError(
                "`teacher_control='unprivileged'`: a teacher with a tokenizer or processor of its own cannot read "
                "the student's tokens: pass one with the student's."
            )
        return None

    def shuffle(self, rows: Sequence[BatchRow], completions: Sequence[list[int]]) -> None:
        """Gives the teacher of each row what is read for another prompt, of all processes. Collective."""
        host, intake, number = self._host, self._readers.intake, self._host.args.num_generations
        own = [row.request.of_teacher for row in rows]
        if intake.reads_completions:
            texts = host.processing_class.batch_decode(completions, skip_special_tokens=True)
            own = [self.own(row, text) for row, text in zip(rows, texts, strict=True)]
        mine = [
            (repr(comparable(row.request.student.value)), prompt, row.contrast)
            for row, prompt in zip(rows, own, strict=True)
        ]
        everyone = gather_object(mine)
        for place, row in enumerate(rows, start=host.accelerator.process_index * len(rows)):
            # The completions of a prompt are adjacent; the same prompt may come twice.
            others = (everyone[(place + away) % len(everyone)] for away in range(number, len(everyone), number))
            found = next((one for one in others if one[0] != everyone[place][0]), None)
            if found is None:
                raise ValueError(
                    f"`teacher_control='shuffled'`, but {host.teaching.batch_name} has one prompt alone: raise "
                    "`per_device_train_batch_size` or `gradient_accumulation_steps`."
                )
            row.control = intake.as_control(row.request, found[1])
            row.contrast = found[2] and intake.as_control(row.request, found[2])
