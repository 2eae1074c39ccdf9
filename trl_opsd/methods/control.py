"""Controls for studies: teachers that cannot teach what a run is said to learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, final

from accelerate.utils import gather_object

from trl_opsd.data.datasets import comparable
from trl_opsd.methods.base import Generated, Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import Rule, Stage, each, not_by_bytes, together, undivided, whole_batch
from trl_opsd.options.table import SET, Option, above, one_of
from trl_opsd.types import Rollout

CONTROLS = ("shuffled", "unprivileged", "constant")
CONSTANT_ADVANTAGE = -0.5
"""Of every token that counts: "fixed negative" in arXiv 2608.31046."""


@with_help
@dataclass
class ControlOptions:
    teacher_control: Annotated[
        str | None,
        Option(one_of(None, *CONTROLS), resumed=True, words="control: {} teacher"),
    ] = None
    """A control for studies: `"shuffled"` gives the teacher the context of another prompt, `"unprivileged"` the
    student's prompt; `"constant"` ignores the teacher and pushes the least likely fifth of the tokens down (arXiv
    2608.31046)."""


@final
class TeacherControl(Method):
    """Puts what a teacher should not know in the place of what it reads; evaluations compare with the real teacher."""

    rules = (
        undivided(lambda args: args.teacher_control == "constant" and "`teacher_control='constant'`"),
        not_by_bytes(
            "teacher_control", one_of("constant"), "which selects tokens by the student's probability of tokens"
        ),
        not_by_bytes(
            "teacher_control", one_of("unprivileged"), "with which the teacher reads the token ids of the student"
        ),
        *each(
            ": the teacher would generate completions with the context that the control takes away: remove one of "
            "them.",
            {"teacher_control": one_of("shuffled", "unprivileged")},
            seq_kd=True,
        ),
        whole_batch("teacher_control", one_of("shuffled")),
        *each(
            ": the control replaces the objective, and its tokens: remove one of them.",
            {"divergence": SET, "token_selection": SET, "top_k_teacher": SET, "kl_clip": SET, "skip_prompts": above(0)},
            teacher_control="constant",
        ),
        together(
            ": the teacher's context is not read: remove one of them.",
            teacher_control="unprivileged",
            teacher_context=SET,
        ),
        Rule(
            lambda now: now.teacher_control == "constant" and now.objective is not None,
            "`teacher_control='constant'` with the argument `divergence`: the control replaces the objective: remove "
            "one of them.",
            at=Stage.ARGUMENTS,
        ),
    )

    @classmethod
    def of(cls, now: Any) -> TeacherControl | None:
        return None if now.teacher_control is None else cls()

    def before(self, rows: Sequence[BatchRow]) -> None:
        if self.host.args.teacher_control == "constant":
            for row in rows:
                row.pull += CONSTANT_ADVANTAGE

    def generated(self, batch: Generated) -> None:
        if self.host.args.teacher_control == "shuffled" and batch.is_training:
            self._shuffle(batch.rows, batch.written.completions)

    def _shuffle(self, rows: Sequence[BatchRow], completions: Sequence[list[int]]) -> None:
        """Gives the teacher of each row what is read for another prompt, of all processes. Collective."""
        host, teaching, number = self.host, self.host.teaching, self.host.args.num_generations
        intake, own = teaching.readers.intake, teaching.prompts.own(rows, completions)
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
                    f"`teacher_control='shuffled'`, but {teaching.batch_name} has one prompt alone: raise "
                    "`per_device_train_batch_size` or `gradient_accumulation_steps`."
                )
            row.control = intake.as_control(row.request, found[1])
            row.contrast = found[2] and intake.as_control(row.request, found[2])

    def teacher_reads(self, read: Rollout, rollout: Rollout, rows: Sequence[BatchRow]) -> Rollout:
        control, readers = self.host.args.teacher_control, self.host.teaching.readers
        if not self.host.model.training:
            return read
        if control == "shuffled" and any(row.control is None for row in rows):
            raise ValueError(
                "`teacher_control='shuffled'` with a batch whose rows come from no dataset: pass the result of "
                "`trainer._generate_and_score_completions(rows)`."
            )
        if control != "unprivileged":
            return read
        if any(readers.intake.processors) or readers.tokenizers:
            raise ValueError(
                "`teacher_control='unprivileged'`: a teacher with a tokenizer or processor of its own cannot read "
                "the student's tokens: pass one with the student's."
            )
        return rollout
