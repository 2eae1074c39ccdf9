"""The probes of a pair, in their order: those of a trainer's start, and those that a training does not repeat."""

from __future__ import annotations

import sys
from functools import partial

from trl_opsd._compat.versions import installed, outside
from trl_opsd.cli.doctor import numerics, tokens
from trl_opsd.cli.doctor.engines import reproduces
from trl_opsd.cli.doctor.pair import Pair
from trl_opsd.cli.doctor.settings import Settings, judged
from trl_opsd.models.probe_runner import Doubt, Finding, Probe, findings
from trl_opsd.models.probes import GRADIENTS, HEAD, PADDING, Probed


def _of(role: str, probe: Probe[Probed], *needs: str) -> Probe[Pair]:
    """A probe of a trainer's start, made of one model of a pair."""
    return Probe(f"{role}'s {probe.name}", lambda pair: probe(pair.probed[role]), needs=needs)


_BOTH = ("student's head", "teacher's head", "student's padding", "teacher's padding")
_TOKENS = ("tokenizers", "vocabularies", "end token")
_WRITES = (*_BOTH, *_TOKENS, "teacher reads")

CHECKS: tuple[Probe[Pair], ...] = (
    Probe("tokenizers", tokens.same_ids),
    Probe("vocabularies", tokens.same_sizes, needs=("tokenizers",)),
    Probe("end token", tokens.end_token),
    Probe("chat template", tokens.template),
    _of("student", HEAD),
    Probe("teacher repeats", numerics.repeats),
    _of("teacher", HEAD, "teacher repeats"),
    _of("student", PADDING, "student's head"),
    _of("teacher", PADDING, "teacher's head"),
    _of("student", GRADIENTS, "student's head"),
    Probe("teacher reads", numerics.depends_on_input, needs=("vocabularies", "teacher's head", "teacher's padding")),
    Probe("teacher = student", numerics.zero_with_itself, needs=("student's head", "student's padding")),
    Probe("loss", numerics.equals_reference, needs=(*_BOTH, "vocabularies")),
    Probe("micro-batches", numerics.same_in_parts, needs=(*_BOTH, "vocabularies")),
    Probe("bfloat16", numerics.half_precision, needs=(*_BOTH, "vocabularies")),
    Probe("transformers writes", reproduces, needs=_WRITES),
)
_VLLM: Probe[Pair] = Probe("vLLM writes", partial(reproduces, use_vllm=True, vllm_mode="colocate"), needs=_WRITES)


def examine(pair: Pair, settings: Settings | ValueError | None = None, vllm: bool = False) -> list[Finding]:
    """All findings, in the order of the checks; `settings` are of a training, or why they cannot be read."""
    checks = [*CHECKS, *([_VLLM] if vllm else [])]
    if settings:
        checks.append(Probe("settings", lambda pair: judged(settings, pair.student.source, pair.teacher.source)))
    checks.append(Probe("versions", lambda pair: _versions()))
    # stdout has the answer alone.
    return list(findings(checks, pair, lambda name: print(f"{name} ...", file=sys.stderr, flush=True)))


def _versions() -> str:
    """Libraries are within the bounds of `setup.cfg`, whose ends were tested."""
    if found := outside(installed()):
        raise Doubt(f"Outside what was tested: {', '.join(found)}.")
    return ", ".join(f"{name} {number}" for name, number in installed().items())
