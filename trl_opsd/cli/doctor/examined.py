"""Runs the checks one after another, and continues after one that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from trl_opsd.cli.doctor import engines, installed, losses, models, tokens
from trl_opsd.cli.doctor.pair import Pair
from trl_opsd.cli.doctor.settings import Settings, judged
from trl_opsd.cli.doctor.verdicts import Doubt, NotApplicable

Verdict = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    name: str
    verdict: Verdict
    said: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a pair: returns what it has seen, or raises."""

    name: str
    run: Callable[[Pair], str]
    needs: tuple[str, ...] = ()
    """Checks whose failure this one would only repeat."""


_BOTH = ("student's head", "teacher's head", "student's padding", "teacher's padding")
_TOKENS = ("tokenizers", "vocabularies", "end token")

CHECKS = (
    Check("tokenizers", tokens.same_ids),
    Check("vocabularies", tokens.same_sizes, ("tokenizers",)),
    Check("end token", tokens.end_token),
    Check("chat template", tokens.template),
    Check("student's head", models.student_head),
    Check("teacher repeats", models.repeats),
    Check("teacher's head", models.teacher_head, ("teacher repeats",)),
    Check("student's padding", models.student_padding, ("student's head",)),
    Check("teacher's padding", models.teacher_padding, ("teacher's head",)),
    Check("student's gradients", models.gradients, ("student's head",)),
    Check("teacher reads", models.depends_on_input, ("vocabularies", "teacher's head", "teacher's padding")),
    Check("teacher = student", losses.zero_with_itself, ("student's head", "student's padding")),
    Check("loss", losses.equals_reference, (*_BOTH, "vocabularies")),
    Check("micro-batches", losses.same_in_parts, (*_BOTH, "vocabularies")),
    Check("bfloat16", losses.half_precision, (*_BOTH, "vocabularies")),
    Check("transformers writes", engines.with_transformers, (*_BOTH, *_TOKENS, "teacher reads")),
)


def examine(pair: Pair, settings: Settings | ValueError | None = None, vllm: bool = False) -> list[Finding]:
    """All findings, in the order of the checks; `settings` are of a training, or why they cannot be read."""
    writes = Check("vLLM writes", engines.with_vllm, CHECKS[-1].needs)
    asked = [*([writes] if vllm else []), *([_of_settings(settings)] if settings else [])]
    found: list[Finding] = []
    for check in (*CHECKS, *asked, Check("versions", lambda _: installed.versions())):
        print(f"{check.name} ...", file=sys.stderr, flush=True)  # stdout has the answer alone
        found.append(_found(check, pair, found))
    return found


def _of_settings(settings: Settings | ValueError) -> Check:
    return Check("settings", lambda pair: judged(settings, pair.student.source, pair.teacher.source))


def _found(check: Check, pair: Pair, before: list[Finding]) -> Finding:
    lacking = [one.name for one in before if one.name in check.needs and one.verdict in ("failed", "skipped")]
    if lacking:
        return Finding(check.name, "skipped", f"Needs: {', '.join(lacking)}.", 0.0)
    start, verdict = perf_counter(), "ok"
    try:
        said = check.run(pair)
    except Doubt as doubt:
        verdict, said = "warning", str(doubt)
    except NotApplicable as reason:
        verdict, said = "skipped", str(reason)
    except Exception as error:  # whatever a model or an engine raises is a finding
        verdict, said = "failed", str(error) or type(error).__name__
    return Finding(check.name, verdict, " ".join(said.split()), round(perf_counter() - start, 2))  # type: ignore[arg-type]
