"""Completions with the divergence of each token and what the teacher would have generated there; the files of a run.

B rows · C completion tokens · n tokens of a row in the loss · V vocabulary size · H hidden size
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd.checkpoints import newest_complete
from trl_opsd.losses import ReverseKL, SampledReverseKL
from trl_opsd.losses.objective import Objective, head_of_reference
from trl_opsd.losses.streamed import streamed_entropy, streamed_known
from trl_opsd.models.tokenizers import readable
from trl_opsd.teacher.comparison import Comparison, selected
from trl_opsd.types import LazyLogits, OutputHead
from trl_opsd.types.known import KnownTokens, TokenHead
from trl_opsd.types.rollout import Author

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

TOKENS = 200
"""Maximum generated tokens of a completion recorded."""
TEXT = 1000
"""Maximum characters of a prompt or a tool's answer recorded; a longer one is cut in the middle."""
CHUNK = 32
"""Tokens whose logits exist at once, few, so that a training that barely fits still does."""
CHOICES = 5
"""The teacher's likeliest tokens recorded at each position."""
FOLDER = "report"
"""Folder in that of the run, for what is recorded while it trains."""
_SAMPLES, _ABOUT = Path(FOLDER, "samples.jsonl"), Path(FOLDER, "about.json")


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a completion with both models' numbers, which are `None` where it is not in the loss."""

    text: str
    """The text that it adds; empty for a token that does not complete a character."""
    divergence: float | None = None
    """In nats."""
    student: float | None = None
    """The student's probability of it."""
    teacher: float | None = None
    """The teacher's probability of it."""
    choices: tuple[tuple[str, float], ...] = ()
    """The teacher's likeliest tokens here, with their probabilities."""
    author: str | None = None
    """Who wrote it, unless the student did."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt as the student got it, and the beginning of its completion."""

    prompt: str
    teacher: str | None
    """The name of the row's teacher, where there are several."""
    tokens: tuple[Token, ...]
    """Those that are no environment's."""
    is_cut: bool
    """Whether the completion goes on."""
    answers: tuple[tuple[int, str], ...] = ()
    """What tools answered, as the chat template has it, each after so many of the tokens."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Samples of one batch."""

    step: int
    """Completed optimizer steps."""
    split: str
    """`"train"`, or the prefix of an evaluation's metrics."""
    samples: tuple[Sample, ...]


@torch.no_grad()
def samples_of(
    trainer: OPSDTrainer,
    comparison: Comparison,
    head: OutputHead,
    teacher_heads: Sequence[OutputHead],
    objective: Objective,
    origin: OutputHead | None,
    rows: Sequence[int],
) -> list[Sample]:
    """Some rows of a batch, with the distributions that its loss compares; waits for the device."""
    rollout, targets, tokenizer = comparison.rollout, comparison.targets, trainer.processing_class
    names = list(trainer.teachers)
    # A sampled estimate says little about a single token: the reverse KL, its mean, is recorded instead.
    measure = ReverseKL() if isinstance(objective.divergence, SampledReverseKL) else objective.divergence
    objective = replace(objective, divergence=measure, chunk_tokens=CHUNK, kl_clip=None, anchor_weight=0.0)
    prompts, found = rollout.prompt_lists(), []
    for row in rows:
        number = 0 if targets.teacher is None else int(targets.teacher[row])
        # Indices are those of the batch's columns: a row of several turns may have masked columns in between.
        mask_C = rollout.completion_mask[row] != 0
        generated = rollout.generated[row].nonzero().squeeze(1).tolist()
        authors = dict.fromkeys(generated, Author.STUDENT)
        if rollout.authors is not None:
            authors = dict(enumerate(map(Author, rollout.authors[row].tolist())))
        is_cut = len(generated) > TOKENS
        end = generated[TOKENS - 1] + 1 if is_cut else len(mask_C)
        places_n = rollout.weights[row, :end].nonzero().squeeze(1).cpu()
        numbers: dict[int, tuple[Any, ...]] = {}
        if len(places_n):
            columns = _numbers(comparison, row, places_n, head, teacher_heads[number], objective, origin)
            numbers = dict(zip(places_n.tolist(), zip(*columns, strict=True), strict=True))
        tokens: list[Token] = []
        answers: list[tuple[int, str]] = []
        ids, before = rollout.completion_ids[row].tolist(), prompts[row]
        for is_generated, run in groupby(mask_C[:end].nonzero().squeeze(1).tolist(), set(generated).__contains__):
            places = list(run)
            written = [ids[place] for place in places]
            if is_generated:
                of_places = [(numbers.get(place), authors[place]) for place in places]
                tokens += _tokens(of_places, written, before, tokenizer.decode)
            else:
                answers.append((len(tokens), _middle_cut(tokenizer.decode(written))))
            before = written
        found.append(
            Sample(
                prompt=_middle_cut(readable(prompts[row], tokenizer, trainer.placeholders)),
                teacher=names[number] if len(names) > 1 else None,
                tokens=tuple(tokens),
                is_cut=is_cut,
                answers=tuple(answers),
            )
        )
    return found


def _numbers(
    comparison: Comparison,
    row: int,
    places_n: Tensor,
    head: OutputHead,
    teacher_head: OutputHead,
    objective: Objective,
    origin: OutputHead | None,
) -> tuple[Sequence[Any], ...]:
    """The columns of [`Token`] but its text, with ids in place of the teacher's choices, and their probabilities."""
    temperatures, vocabulary, device = objective.temperatures, objective.vocabulary, head.weight.device
    teacher_head, targets = teacher_head.to(device), comparison.targets
    student = selected(comparison.hidden_BCH[row].detach(), places_n).to(device), head
    sampled_n = selected(comparison.rollout.completion_ids[row], places_n).to(device)
    of_student = (-streamed_entropy(LazyLogits(*student, temperatures[0]), CHUNK, vocabulary, sampled_n)).exp().tolist()
    if comparison.nats is not None:
        told_n: list[float] = comparison.nats(objective, row, places_n, head, teacher_head).tolist()
        return told_n, of_student, [None] * len(sampled_n), *[[()] * len(sampled_n)] * 2
    theirs = targets.of(row, places_n).to(device), teacher_head
    reference_states = {
        name: (states_nH.to(device), head_of_reference(name, teacher_head, origin))
        for name, states_nH in targets.reference_states_of(row, places_n).items()
    }
    nats_n = objective.of(student, theirs, None, None, reference_states).divergence.tolist()
    if isinstance(teacher_head, TokenHead):  # the token of the row is the first
        known = KnownTokens.unpack(theirs[0])
    else:
        known = streamed_known(LazyLogits(*theirs, temperatures[1]), sampled_n, CHOICES, CHUNK, vocabulary)
    probabilities_nK, ids_nK = known.likeliest(CHOICES)
    return nats_n, of_student, known.logprobs[:, 0].exp().tolist(), ids_nK.tolist(), probabilities_nK.tolist()


def _tokens(
    numbers: Iterable[tuple[Any, Author]], ids: Sequence[int], before: list[int], decode: Callable[..., str]
) -> Iterator[Token]:
    for (of, author), text, last in zip(numbers, _pieces(ids, decode), [*before[-1:], *ids], strict=False):
        nats, student, teacher, best, shares = of or (None, None, None, (), ())
        choices = tuple((_after(last, one, decode), share) for one, share in zip(best, shares, strict=True))
        yield Token(text, nats, student, teacher, choices, None if author is Author.STUDENT else author.word)


def _pieces(ids: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text that each token adds; that of a character of several tokens comes with the last."""
    done = ""
    for end in range(1, len(ids) + 1):
        # Decoded from the start each time, since a token's text depends on those before it.
        text = decode(list(ids[:end])).rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[len(done) :]
        done = text if len(text) > len(done) else done


def _after(last: int, token: int, decode: Callable[[list[int]], str]) -> str:
    """The text of a token after another, as many tokenizers drop the leading space of a first token."""
    before, both = decode([last]), decode([last, token])
    return both[len(before) :] if both.startswith(before) and len(both) > len(before) else decode([token])


def _middle_cut(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[: TEXT // 2]} … {text[-TEXT // 2 :]}"


# ---- Files of a run --------------------------------------------------------------------------------------------------


def state_file(run: Path) -> Path:
    """File of a run's log, also of one that saves no checkpoints."""
    return run / FOLDER / TRAINER_STATE_NAME


def tell(run: Path, what: Mapping[str, str]) -> None:
    """Writes a description of models, objective and settings, by topic."""
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    (run / _ABOUT).write_text(json.dumps(dict(what), ensure_ascii=False, indent=1), encoding="utf-8")


def about(run: Path) -> dict[str, str]:
    """What [`tell`] wrote; empty where nothing was recorded."""
    return json.loads((run / _ABOUT).read_text(encoding="utf-8")) if (run / _ABOUT).exists() else {}


def append(run: Path, recorded: Recorded) -> None:
    """Appends a line; numbers are rounded to four digits, and `null` where they are not finite."""
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    with (run / _SAMPLES).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(rounded(asdict(recorded)), ensure_ascii=False, allow_nan=False) + "\n")


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def keep_until(run: Path, step: int) -> None:
    """Removes what was recorded after a step from which the run resumes; after step 0, everything."""
    state_file(run).unlink(missing_ok=True)
    # Lines after the step come from the training that the resumed run replaces.
    kept = [line for line in _lines(run) if json.loads(line)["step"] <= step] if step else []
    (run / _SAMPLES).unlink(missing_ok=True)
    if kept:
        (run / _SAMPLES).write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _lines(run: Path) -> list[str]:
    # What follows the last line break is empty, or a line that a killed run did not finish.
    file = run / _SAMPLES
    return file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if file.exists() else []


def recorded_in(run: Path) -> list[Any]:
    """All that was recorded, in order, with the attributes of [`Recorded`], [`Sample`] and [`Token`]."""
    return [json.loads(line, object_hook=lambda one: SimpleNamespace(**one)) for line in _lines(run)]


def log_of(run: Path) -> list[dict[str, Any]]:
    """The `log_history` of a run or a checkpoint, from whichever file has the latest step; empty if there is none."""
    newest, _ = newest_complete(run)
    # The folder may be a run with its own record, a checkpoint, or a run with checkpoints.
    files = [state_file(run), run / TRAINER_STATE_NAME, *([newest / TRAINER_STATE_NAME] if newest else [])]
    states = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return max(states, key=lambda one: one["global_step"])["log_history"] if states else []
