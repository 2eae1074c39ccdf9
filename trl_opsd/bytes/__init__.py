"""A teacher with another tokenizer is compared by the next byte of a text; here is what a trainer asks of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from trl_opsd.bytes.forks import Forking
from trl_opsd.bytes.teacher import ByteTeacher
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.config import OPSDConfig
from trl_opsd.models.probes import Probe, Probed
from trl_opsd.teacher.base import Teacher


class ByteTokenizers:
    """What tokens of the student and of its teachers spell, proved on texts: `cross_tokenizer="bytes"`."""

    def __init__(
        self,
        args: OPSDConfig,
        student: PreTrainedTokenizerBase,
        theirs: Mapping[str, PreTrainedTokenizerBase],
        texts: Iterable[str],
    ) -> None:
        self.of_teachers = theirs
        self._student, most_missed = (
            ByteVocabulary.of(student, "the student's tokenizer", texts),
            args.cross_tokenizer_missed,
        )
        self._theirs = {
            name: ByteVocabulary.of(one, f"the tokenizer of the {name}", texts) for name, one in theirs.items()
        }
        self._forking = Forking("student", most_missed)
        self.probes: list[Probe[Probed]] = [self._forking.probe] if most_missed < 1 else []
        """What the student is tried with."""

    def within(self, rows: int) -> int:
        """Limits the student's tokens to the rows of its head; other ids have no bytes, so they are never generated."""
        self._student = self._student.within(rows)
        return len(self._student.texts)

    def teacher(self, name: str, teacher: Teacher, host: Any) -> Teacher:
        """A teacher of a trainer, as one that is compared with the student."""
        return ByteTeacher(teacher, self._student, self._theirs[name], host, self._forking)
