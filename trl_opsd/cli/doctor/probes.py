"""The probes of a pair, in their order: those of a trainer's start, and those that a training does not repeat."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from trl_opsd._compat.versions import installed, outside
from trl_opsd.cli.doctor import numerics
from trl_opsd.cli.doctor.pair import LAYERS, Pair, Side
from trl_opsd.cli.doctor.settings import Settings, judged
from trl_opsd.data.tokenization import check_that_all_is_read, check_token_maps, largest_id
from trl_opsd.models.probes import GRADIENTS, HEAD, PADDING, Doubt, Finding, Probe, Probed, findings
from trl_opsd.models.tokenizers import ensure_special_tokens

_QUESTION = {"role": "user", "content": "A question."}
_ANSWER = {"role": "assistant", "content": "An answer."}


def same_ids(pair: Pair) -> str:
    """Both tokenizers give every token the same id."""
    if pair.assumes_tokenizer:
        raise Doubt("The teacher has no tokenizer to compare: it is assumed to read the student's ")
    check_token_maps(pair.student.tokenizer, pair.teacher.tokenizer)
    return f"The same {len(pair.student.tokenizer.get_vocab())} tokens, id by id."


def same_sizes(pair: Pair) -> str:
    """Both heads have a row for each token."""
    shared, rows = pair.vocabulary, (pair.student.rows, pair.teacher.rows)
    tokens = largest_id(pair.student.tokenizer) + 1
    if tokens > rows[0]:
        raise ValueError(
            f"The tokenizer has {tokens} tokens, but both heads have {rows[0]} rows: use the tokenizer that the models "
            "were trained with."
        )
    if shared is None:
        return f"Both heads have {rows[0]} rows."
    return f"Heads of {rows[0]} and {rows[1]} rows; the {shared} ids of the tokenizer are compared."


def end_token(pair: Pair) -> str:
    """A completion can end, and the generation config knows with which"""
    tokenizer = pair.student.tokenizer
    ensure_special_tokens(tokenizer, pair.student.rows)
    known = end_ids(pair.student)
    if tokenizer.eos_token_id not in known:
        shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(known)))
        raise Doubt(
            f"The tokenizer ends texts with {tokenizer.eos_token!r}, the generation config with {shown}: make them "
            "agree, or completions may not end where the tokenizer says."
        )
    return f"{tokenizer.eos_token!r}, id {tokenizer.eos_token_id}."


def end_ids(side: Side) -> list[int]:
    """The ids that end a completion, as the model's generation config has them; the tokenizer's, if it has none."""
    found = side.model.generation_config.eos_token_id
    listed = found if isinstance(found, list) else [] if found is None else [found]
    return listed or [side.tokenizer.eos_token_id]


def template(pair: Pair) -> str:
    """The chat template writes all that the user says, opens the answer, and closes it with an end token."""
    mine = pair.student.tokenizer
    if mine.chat_template is None:
        raise Doubt("The tokenizer has no chat template: prompts have to be text, not conversations.")
    check_that_all_is_read([_QUESTION, _ANSWER, _QUESTION], partial(_rendered, mine), "A conversation")
    opening = _rendered(mine).removeprefix(str(mine.apply_chat_template([_QUESTION], tokenize=False)))
    if not opening:
        raise ValueError(
            "The chat template writes no generation prompt: with `add_generation_prompt=True` it renders the same as "
            "without, so that the student has to write the beginning of its own turn. Use a template that reads "
            "`add_generation_prompt`, as that of an instruct model."
        )
    if pair.teacher.tokenizer.chat_template and _rendered(pair.teacher.tokenizer) != _rendered(mine):
        raise Doubt(
            "The teacher's chat template renders a conversation otherwise than the student's, which is used for both: "
            "the teacher reads a format that it was not trained on."
        )
    _check_ending(pair.student)
    return f"Opens an answer with {opening!r}."


def _check_ending(side: Side) -> None:
    text = side.tokenizer.apply_chat_template([_QUESTION, _ANSWER], tokenize=False)
    ends = [token for token in side.tokenizer.convert_ids_to_tokens(end_ids(side)) if token]
    after = str(text).rpartition(str(_ANSWER["content"]))[2]
    if ends and not any(token in after for token in ends):
        raise Doubt(
            f"After an answer the chat template writes {after!r}, in which there is no end token ({', '.join(ends)}): "
            "a model trained on it never learned to end, and completions run to their limit."
        )


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]] = (_QUESTION,)) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def _of(role: str, probe: Probe[Probed], *needs: str) -> Probe[Pair]:
    """A probe of a trainer's start, made of one model of a pair."""
    return Probe(f"{role}'s {probe.name}", lambda pair: probe(pair.probed[role]), needs=needs)


_BOTH = ("student's head", "teacher's head", "student's padding", "teacher's padding")
_TOKENS = ("tokenizers", "vocabularies", "end token")
_WRITES = (*_BOTH, *_TOKENS, "teacher reads")

CHECKS: tuple[Probe[Pair], ...] = (
    Probe("tokenizers", same_ids),
    Probe("vocabularies", same_sizes, needs=("tokenizers",)),
    Probe("end token", end_token),
    Probe("chat template", template),
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
    Probe("transformers writes", numerics.reproduces, needs=_WRITES),
)
_VLLM: Probe[Pair] = Probe(
    "vLLM writes", partial(numerics.reproduces, use_vllm=True, vllm_mode="colocate"), needs=_WRITES
)


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


_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def verdict(findings: Sequence[Finding]) -> str:
    """All findings in a sentence."""
    of = {kind: [one.name for one in findings if one.verdict == kind] for kind in _COLOURS}
    rest = f"; {len(of['warning'])} warned" if of["warning"] else ""
    rest += f"; {len(of['skipped'])} could not be made" if of["skipped"] else ""
    if of["failed"]:
        return f"Not ready: {len(of['failed'])} of {len(findings)} checks failed ({', '.join(of['failed'])}){rest}."
    return f"Ready: {len(of['ok'])} of {len(findings)} checks passed{rest}."


def document(pair: Pair, findings: Sequence[Finding]) -> str:
    """The findings as JSON."""
    found = {
        "student": pair.student.source,
        "teacher": pair.teacher.source,
        "tiny": pair.tiny,
        "ready": all(one.verdict != "failed" for one in findings),
        "verdict": verdict(findings),
        "checks": [asdict(one) for one in findings],
    }
    return json.dumps(found, indent=2)


def show(pair: Pair, findings: Sequence[Finding]) -> None:
    """Prints a table and the verdict."""
    console = Console()
    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for one in findings:
        colour = _COLOURS[one.verdict]
        # Rich reads brackets as markup.
        table.add_row(one.name, f"[{colour}]{one.verdict}[/]", f"{one.seconds:.1f}", one.said.replace("[", r"\["))
    console.print(table)
    if pair.tiny:
        console.print(
            f"\nBoth models were built with {LAYERS} random layers and narrow feed-forward parts: heads, tokenizers "
            "and templates are as they are, weights are not."
        )
    console.print(f"\n{verdict(findings)}", highlight=False)
