"""A teacher with another tokenizer is compared by the next byte of a text; here is what a trainer asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from trl_opsd._compat.sharding import launched
from trl_opsd.bytes.forks import Forking
from trl_opsd.bytes.teacher import ByteTeacher
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.config import OPSDConfig
from trl_opsd.losses import Divergence, SampledReverseKL
from trl_opsd.methods.base import Method
from trl_opsd.models.probes import Probed
from trl_opsd.options.rules import refuse, shown
from trl_opsd.teacher.base import Teacher
from trl_opsd.types.metrics import BATCHES, MEAN, Logs, Metric

_OF_TOKENS = ("top_k_teacher", "kl_clip", "teacher_server_url", "teacher_model_kind", "teacher_targets")
"""Options of a teacher that has the student's tokens."""
_ALWAYS = Logs(MEAN, '`cross_tokenizer="bytes"`')


class ByteTokenizers:
    """What tokens of the student and of its teachers spell, proved on texts: `cross_tokenizer="bytes"`."""

    metrics: ClassVar[Mapping[str, Metric]] = MappingProxyType(
        {
            "cross/divergence": Metric(
                "nats",
                "Divergence per byte; token weights multiply the sum, not the number of bytes.",
                _ALWAYS,
                "divergence / compared",
            ),
            "cross/used": Metric("1", "Share of bytes that were compared.", _ALWAYS, "compared / outcomes"),
            "cross/escape": Metric(
                "1",
                "Upper bound of the probability missing from a distribution, mean over compared bytes.",
                _ALWAYS,
                "escaped / compared",
            ),
            "cross/lost": Metric(
                "1",
                "Share of bytes that the teacher's tokenizer changes, or that exceed its context.",
                _ALWAYS,
                "lost / outcomes",
            ),
            "cross/forks": Metric(
                "1",
                "Alternative tokens that the student scores in addition, per completion token.",
                Logs("all processes and micro-batches", f"{_ALWAYS.appears} with `cross_tokenizer_missed` below 1"),
            ),
            "cross/retold": Metric(
                "1",
                "Share of the bytes of teachers' completions kept when re-tokenized for the student.",
                Logs(BATCHES, f"{_ALWAYS.appears} with `seq_kd`", evaluated=False),
            ),
        }
    )

    @staticmethod
    def check(args: OPSDConfig, divergence: Divergence, methods: Sequence[Method], tools: Any) -> None:
        """Refuses what reads tokens that both models have, or rows that are divided."""
        needs_tokens = "the teacher has other tokens than the student; remove one of them"
        refuse(
            (is_met, f"{shown(args, 'cross_tokenizer')} with {beside}", why)
            for is_met, beside, why in (
                *((getattr(args, name) is not None, shown(args, name), needs_tokens) for name in _OF_TOKENS),
                *((one.by_token, f"`{type(one).__name__}`", needs_tokens) for one in methods),
                (isinstance(divergence, SampledReverseKL), f"{divergence!r}", needs_tokens),
                (launched(args).sp_enabled, "`sp_size`", "it needs whole rows"),
                (bool(tools), "`tools`", "tools answer in the student's chat template; remove one of them"),
            )
        )

    def __init__(
        self,
        args: OPSDConfig,
        student: PreTrainedTokenizerBase,
        theirs: Mapping[str, PreTrainedTokenizerBase],
        texts: Iterable[str],
    ) -> None:
        self.of_teachers, most_missed = theirs, args.cross_tokenizer_missed
        self._student = ByteVocabulary.of(student, "the student's tokenizer", texts)
        self._theirs = {
            name: ByteVocabulary.of(one, f"the tokenizer of the {name}", texts) for name, one in theirs.items()
        }
        self._forking = Forking("student", most_missed)
        self.probes: list[Callable[[Probed], None]] = [self._forking.probe] if most_missed < 1 else []
        """What the student is tried with."""

    def within(self, rows: int) -> int:
        """Limits the student's tokens to the rows of its head; other ids have no bytes, so they are never generated."""
        self._student = self._student.within(rows)
        return len(self._student.texts)

    def teacher(self, name: str, teacher: Teacher, host: Any) -> Teacher:
        """A teacher of a trainer, as one that is compared with the student."""
        return ByteTeacher(teacher, self._student, self._theirs[name], host, self._forking)
