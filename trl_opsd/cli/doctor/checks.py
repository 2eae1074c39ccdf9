"""The checks of `trl-opsd doctor`: those of a trainer's start, and others that a training does not repeat.

N completion tokens · H hidden size
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from trl_opsd._compat.versions import installed, untested
from trl_opsd.cli.doctor.pair import LAYERS, TEXTS, Pair, models_of
from trl_opsd.cli.train.options import RunOptions
from trl_opsd.config import OPSDConfig
from trl_opsd.data.images import probe_prompts, read_with_images
from trl_opsd.data.tokenization import check_that_all_is_read, check_token_maps, largest_id
from trl_opsd.losses import Divergence, ForwardKL, GeneralizedJSD, ReverseKL, dense_divergence, streamed_divergence
from trl_opsd.models.backbone import completion_hidden, logits_of
from trl_opsd.models.probes import GRADIENTS, HEAD, IMAGES, PADDING, Doubt, Finding, Probe, Probed, findings
from trl_opsd.models.tokenizers import ensure_special_tokens
from trl_opsd.rollout import FixedRollout, RolloutBackend
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import LazyLogits, OutputHead, Rollout

# ---- Tokenizers and chat templates -----------------------------------------------------------------------------------

_QUESTION = {"role": "user", "content": "A question."}
_ANSWER = {"role": "assistant", "content": "An answer."}


def same_ids(pair: Pair) -> str:
    """Both tokenizers give every token the same id."""
    if pair.assumes_tokenizer:
        raise Doubt("The teacher has no tokenizer to compare: it is assumed to use the student's.")
    check_token_maps(pair.student.tokenizer, pair.teacher.tokenizer)
    return f"The same {len(pair.student.tokenizer.get_vocab())} tokens, id by id."


def same_texts(pair: Pair) -> str:
    """Both tokenizers read enough texts alike that `cross_tokenizer` can compare them."""
    read = pair.student.tokenizer
    prompts, answers = zip(*TEXTS, strict=True)
    ids = [tuple(read(prompt)["input_ids"]) for prompt in prompts]
    recorded = dict(zip(ids, (read(one, add_special_tokens=False)["input_ids"] for one in answers), strict=True))
    options = {"cross_tokenizer": pair.cross_tokenizer, "max_completion_length": max(map(len, recorded.values()))}
    with _started(pair, prompts, FixedRollout(recorded), **options) as (trainer, _):
        used = trainer.evaluate(trainer.train_dataset)["eval_cross/used"]
    of = f"{used:.0%} of the text of three rows can be compared."
    if used < 0.5:
        raise Doubt(f"{of} The rest is left out: see docs/tokenizers.md.")
    return of


def same_sizes(pair: Pair) -> str:
    """Both heads have a row for each token."""
    shared, rows, tokens = pair.vocabulary, pair.student.rows, largest_id(pair.student.tokenizer) + 1
    if tokens > rows:
        raise ValueError(f"The tokenizer has {tokens} tokens, but both heads have {rows} rows: use the models' own.")
    if shared is None:
        return f"Both heads have {rows} rows."
    return f"Heads of {rows} and {pair.teacher.rows} rows; the {shared} ids of the tokenizer are compared."


def end_token(pair: Pair) -> str:
    """A completion can end, and the generation config knows with which"""
    tokenizer = pair.student.tokenizer
    ensure_special_tokens(tokenizer, pair.student.rows)
    if tokenizer.eos_token not in (known := pair.student.ends):
        raise Doubt(f"The end token is {tokenizer.eos_token!r} in the tokenizer, {known} in the generation config.")
    return f"{tokenizer.eos_token!r}, id {tokenizer.eos_token_id}."


def template(pair: Pair) -> str:
    """The chat template writes all that the user says, opens the answer, and closes it with an end token."""
    mine, theirs = pair.student.tokenizer, pair.teacher.tokenizer
    if mine.chat_template is None:
        raise Doubt("The tokenizer has no chat template: prompts have to be text, not conversations.")

    def rendered(*messages: dict[str, str], by: Any = mine, opened: bool = True) -> str:
        return str(by.apply_chat_template([*messages], tokenize=False, add_generation_prompt=opened))

    check_that_all_is_read([_QUESTION, _ANSWER, _QUESTION], lambda marked: rendered(*marked), "A conversation")
    opening = rendered(_QUESTION).removeprefix(rendered(_QUESTION, opened=False))
    if not opening:
        raise ValueError("The chat template ignores `add_generation_prompt`: use that of an instruct model.")
    if pair.cross_tokenizer is None and theirs.chat_template and rendered(_QUESTION, by=theirs) != rendered(_QUESTION):
        raise Doubt("The teacher's chat template differs, and the student's is used for both.")
    after = rendered(_QUESTION, _ANSWER, opened=False).rpartition(_ANSWER["content"])[2]
    if pair.student.ends and not any(token in after for token in pair.student.ends):
        raise Doubt(
            f"After an answer the chat template renders {after!r}, which contains no end token "
            f"({', '.join(pair.student.ends)}): completions may run to their limit."
        )
    return f"Opens an answer with {opening!r}."


# ---- States of the teacher, and the loss of this pair against its reference in float64 -------------------------------

_DIVERGENCES = {"forward_kl": ForwardKL(), "reverse_kl": ReverseKL(), "jsd": GeneralizedJSD(0.5)}
_ALIKE = 1e-5
"""Largest difference between states, relative to the largest value, that float32 rounding explains."""
_ROUNDING = 1e-4
"""Largest difference, relative to the largest value, that the order of float32 sums explains."""
_NOTHING = 0.1
"""Lower bound of the value a difference is relative to: between models that agree all is rounding."""


@torch.no_grad()
def repeats(pair: Pair) -> str:
    """The teacher's logits are the same in a second forward pass."""
    ids_BL = torch.arange(16, device=pair.device).mul(pair.teacher.rows // 16)[None]
    # NaN is a finding of other checks; here it would differ from itself.
    first, again = (pair.teacher.model(input_ids=ids_BL, use_cache=False).logits.float().nan_to_num() for _ in range(2))
    gap = float((first - again).abs().max() / first.abs().max().clamp(min=1e-30))
    if gap > _ALIKE:
        raise ValueError(f"Two forward passes differ by {gap:.1e} of the largest logit: it draws random numbers.")
    return f"Two forward passes agree {f'up to {gap:.0e} of the largest logit' if gap else 'bit for bit'}."


def depends_on_input(pair: Pair) -> str:
    """The teacher's states depend on what it reads."""
    # Not bit for bit, as the guard of a training compares them: attention rounds the average of equal values.
    states_NH = _logits_after(pair, "teacher", pair.read_by("student")).hidden
    spread, largest = (states_NH - states_NH.mean(0)).abs().max(), states_NH.abs().max()
    if spread < _ALIKE * largest:
        raise ValueError(f"The teacher has the same hidden state at all {len(states_NH)} tokens: reload its weights.")
    return f"States differ between tokens by up to {spread / largest:.2g} of the largest value."


def zero_with_itself(pair: Pair) -> str:
    """A model as its own teacher has divergence and gradient 0."""
    mine = _logits_after(pair, "student")
    for name, divergence in _DIVERGENCES.items():
        largest = _largest(_compared(mine, mine, divergence))
        if not largest < _ROUNDING:
            raise ValueError(f"`{name}` between the student and itself, or its gradient, is {largest:.2g}: expected 0.")
    return f"{', '.join(_DIVERGENCES)}: 0, with gradient 0."


def equals_reference(pair: Pair) -> str:
    """Values and gradients equal those of the reference, for any number of tokens at a time."""
    mine, yours, said = _logits_after(pair, "student"), _logits_after(pair, "teacher"), []
    for name, divergence in _DIVERGENCES.items():
        expected = _reference(mine, yours, divergence, pair.vocabulary)
        for chunk in (1, 7, None):  # the smallest tile, one that divides nothing, and all tokens
            found = _compared(mine, yours, divergence, chunk, pair.vocabulary)
            pairs = zip(found, expected, strict=True)
            gap = _largest((one - exact) / exact.abs().max().clamp(min=_NOTHING) for one, exact in pairs)
            if not gap <= _ROUNDING:
                raise ValueError(
                    f"`{name}` in tiles of {chunk or 'all'} tokens is off by {gap:.2g} of the largest value."
                )
        said.append(f"{name} {expected[0].mean():.4g}")
    return f"Equal to float64 for any `loss_chunk_tokens`: {', '.join(said)} nats."


def same_in_parts(pair: Pair) -> str:
    """The gradient of three rows is the sum of each row's alone, without padding."""
    model, norms = pair.student.model, []
    mine, yours = pair.read_by("student"), pair.read_by("teacher")
    model.zero_grad()
    # Each row's gradient is subtracted where that of all is, as a second one takes as much memory as the model.
    for sign, parts in ((1, [[0, 1, 2]]), (-1, [[0], [1], [2]])):
        for rows in parts:
            student = _logits_after(pair, "student", mine.select(rows).cut(), trained=True)
            teacher = _logits_after(pair, "teacher", yours.select(rows).cut())
            value_N = streamed_divergence(student, teacher, _DIVERGENCES["forward_kl"], vocabulary=pair.vocabulary)
            (sign * value_N.divergence.sum()).backward()
        norms.append(sum(float(one.grad.norm()) ** 2 for one in model.parameters() if one.grad is not None) ** 0.5)
    model.zero_grad()
    gap = norms[1] / max(norms[0], _ROUNDING)
    if not gap < 10 * _ROUNDING:
        raise ValueError(f"The gradient of a batch differs from the sum over its rows by {gap:.2g} of its norm.")
    return f"The gradient of 3 rows is the sum of the gradients of each, up to {gap:.0e}."


def half_precision(pair: Pair) -> str:
    """What computing in bfloat16 changes."""
    values, firsts = [], []
    for enabled in (False, True):
        with torch.autocast(pair.device.type, torch.bfloat16, enabled=enabled):
            mine, yours = _logits_after(pair, "student"), _logits_after(pair, "teacher")
            found = streamed_divergence(mine, yours, _DIVERGENCES["forward_kl"], vocabulary=pair.vocabulary)
            firsts.append((mine.hidden.float() @ mine.head.weight.float().T).argmax(-1))
        values.append(float(found.divergence.mean()))
    alike = float((firsts[0] == firsts[1]).float().mean())
    exact, rounded = values
    said = f"{exact:.4g} nats in float32, {rounded:.4g} in bfloat16; the same top token at {alike:.0%} of positions."
    if not abs(rounded - exact) <= 0.1 * abs(exact) + 1e-3:
        raise Doubt(f"{said} Train in float32, or compare a short run in both.")
    return said


def _logits_after(pair: Pair, role: str, rollout: Rollout | None = None, trained: bool = False) -> LazyLogits:
    """The logits of a model after the rows that it reads; with a gradient for its weights if `trained`."""
    probed, rollout = pair.probed[role], rollout or pair.read_by(role)
    head = OutputHead.of(probed.model)
    with torch.set_grad_enabled(trained):
        hidden_NH = completion_hidden(probed.model, rollout, probed.batching)[rollout.counts]
    if not trained:
        bias = None if head.bias is None else head.bias.detach()
        head = replace(head, weight=head.weight.detach(), bias=bias)
    return LazyLogits(hidden_NH, head)


def _compared(
    mine: LazyLogits,
    yours: LazyLogits,
    divergence: Divergence,
    chunk: int | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[N] and [N, H], a divergence and its gradient with respect to the student's states."""
    student = replace(mine, hidden=mine.hidden.clone().requires_grad_())
    value_N = streamed_divergence(student, yours, divergence, chunk_tokens=chunk, vocabulary=vocabulary).divergence
    (gradient_NH,) = torch.autograd.grad(value_N.sum(), student.hidden)
    return value_N.detach(), gradient_NH


def _largest(found: Iterable[Tensor]) -> float:
    """The largest absolute value in some tensors; NaN if any is, which Python's `max` may pass over."""
    return float(torch.stack([one.abs().max() for one in found]).max())


def _reference(
    mine: LazyLogits, yours: LazyLogits, divergence: Divergence, vocabulary: int | None
) -> tuple[Tensor, Tensor]:
    """[N] and [N, H], float64 from the logits on: the reference and its gradient, without a copy of a head."""
    # Logits are themselves those of unit vectors as states, with the logits as the head.
    unit_NN = torch.eye(len(mine.hidden), dtype=torch.float64, device=mine.hidden.device)
    logits_VN = [(one.head.weight @ one.hidden.T).double().requires_grad_() for one in (mine, yours)]
    student, teacher = (
        replace(one, hidden=unit_NN, head=replace(one.head, weight=weight))
        for one, weight in zip((mine, yours), logits_VN, strict=True)
    )
    value_N = dense_divergence(student, teacher, divergence, vocabulary=vocabulary).divergence
    (gradient_VN,) = torch.autograd.grad(value_N.sum(), logits_VN[:1])
    return value_N.detach(), gradient_VN.float().T @ mine.head.weight


# ---- What engines generate -------------------------------------------------------------------------------------------

TOKENS = 16
"""Maximum tokens of a completion."""
_TIE = 0.02
"""Nats by which a generated token may be less likely than the likeliest: other kernels round differently."""


@contextmanager
def _started(
    pair: Pair, prompts: Sequence[str], rollout: RolloutBackend | None = None, **options: Any
) -> Iterator[tuple[OPSDTrainer, dict[str, float]]]:
    """A trainer after all checks of its start, and what it records; `options` are a training's."""
    recorded: dict[str, float] = {}

    class Noting(OPSDTrainer):
        def record(self, name: str, value: float, count: float = 1) -> None:
            recorded[name] = float(value)
            super().record(name, value, count)

    with TemporaryDirectory() as folder:
        rows, on_cpu = len(prompts), pair.device.type == "cpu"
        config = OPSDConfig(
            output_dir=folder, report_to="none", bf16=False, max_steps=1, use_cpu=on_cpu, disable_tqdm=True,
            per_device_train_batch_size=rows, per_device_eval_batch_size=rows, **options,
        )  # fmt: skip
        trainer = Noting(
            model=pair.student.model,
            teacher_model=pair.teacher.model,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [*prompts]}),
            processing_class=pair.student.tokenizer,
            teacher_processing_class=pair.teacher.tokenizer if pair.cross_tokenizer else None,
            rollout=rollout,
        )
        try:
            yield trainer, recorded
        finally:
            trainer.rollout.close()


def reproduces(pair: Pair, rollout: RolloutBackend | None = None, **options: Any) -> str:
    """Generates the likeliest token at each place, and checks that the student agrees; `options` are a training's."""
    asked, _ = pair.texts
    texts, greedy = pair.student.tokenizer.batch_decode(asked), {"max_completion_length": TOKENS, "top_k": 1}
    with _started(pair, texts, rollout, **greedy, **options) as (trainer, recorded), trainer.rollout.session():
        answered = trainer.rollout.complete([*asked], 0)
    gap = _largest([torch.tensor([_shortfall(pair, *row) for row in zip(asked, answered, strict=True)])])
    if not gap < _TIE:  # not `>=`: NaN has to fail, too
        raise ValueError(
            f"{trainer.rollout}, decoding greedily, generated a token that is {gap:.3g} nats less likely than the "
            "student's likeliest: its weights differ from the student's, or its computation does."
        )
    said = f"{sum(map(len, answered))} tokens, each the student's most likely (within {gap:.1g} nats)"
    told = recorded.get("rollout/logprob_gap")
    return f"{said}." if told is None else f"{said}; its log-probabilities match the student's within {told:.1g} nats."


@torch.no_grad()
def _shortfall(pair: Pair, prompt: list[int], completion: list[int]) -> float:
    """The largest gap, in nats, between a token of a completion and the likeliest one in its place."""
    if not completion:
        return 0.0
    # Log-probabilities by a forward pass over prompt and completion, not by the cache of a decoding loop.
    model, row = pair.student.model, Rollout.of([prompt], [completion], pair.device)
    log_CV = logits_of(completion_hidden(model, row)[0], OutputHead.of(model)).log_softmax(-1)
    return float((log_CV.amax(-1) - log_CV.gather(-1, row.completion_ids[0, :, None]).squeeze(-1)).max())


# ---- Settings and versions -------------------------------------------------------------------------------------------


def check_settings(settings: RunOptions | ValueError, examined: tuple[str, str]) -> str:
    """Settings are known and consistent, and of the models that are examined."""
    if isinstance(settings, ValueError):
        raise settings
    for role, named, one in zip(("student", "teacher"), models_of(settings), examined, strict=True):
        if named not in (None, one):
            raise Doubt(f"The file sets the {role} {named!r}, but {one!r} was examined.")
    return "All settings are known and consistent."


def versions(_: Pair) -> str:
    """Libraries are within the bounds of `setup.cfg`, whose ends were tested."""
    if said := untested(installed()):
        raise Doubt(said)
    return ", ".join(f"{name} {number}" for name, number in installed().items())


# ---- All, in their order ---------------------------------------------------------------------------------------------


def _of(role: str, probe: Probe[Probed], *needs: str) -> Probe[Pair]:
    """A probe of a trainer's start, made of one model of a pair."""
    return Probe(f"{role}'s {probe.name}", lambda pair: probe.run(pair.probed[role]), needs=needs)


def _images(role: str) -> Probe[Pair]:
    """The probe of a trainer whose prompts have images, which may be text all the same."""

    def run(pair: Pair) -> str:
        probed = pair.probed[role]
        try:
            probed.seen = probe_prompts(partial(read_with_images, getattr(pair, role).processing))
        except ValueError as error:
            raise Doubt(f"Prompts have to be text: a prompt with an image cannot be made, as {error}") from error
        return IMAGES.run(probed)

    return Probe(f"{role}'s {IMAGES.name}", run, needs=(f"{role}'s head", f"{role}'s padding"))


_BOTH = ("student's head", "teacher's head", "student's padding", "teacher's padding")
_TOKENS = ("tokenizers", "vocabularies", "end token")
_GENERATES = (*_BOTH, *_TOKENS, "teacher input")

CHECKS: tuple[Probe[Pair], ...] = (
    Probe("tokenizers", same_ids),
    Probe("vocabularies", same_sizes, needs=("tokenizers",)),
    Probe("end token", end_token),
    Probe("chat template", template),
    _of("student", HEAD),
    Probe("teacher determinism", repeats),
    _of("teacher", HEAD, "teacher determinism"),
    _of("student", PADDING, "student's head"),
    _of("teacher", PADDING, "teacher's head"),
    _of("student", GRADIENTS, "student's head"),
    Probe("teacher input", depends_on_input, needs=("vocabularies", "teacher's head", "teacher's padding")),
    Probe("teacher = student", zero_with_itself, needs=("student's head", "student's padding")),
    Probe("loss", equals_reference, needs=(*_BOTH, "vocabularies")),
    Probe("micro-batches", same_in_parts, needs=(*_BOTH, "vocabularies")),
    Probe("bfloat16", half_precision, needs=(*_BOTH, "vocabularies")),
    Probe("transformers rollout", reproduces, needs=_GENERATES),
)
_VLLM: Probe[Pair] = Probe("vLLM rollout", partial(reproduces, use_vllm=True, vllm_mode="colocate"), needs=_GENERATES)


def examine(pair: Pair, settings: RunOptions | ValueError | None = None, vllm: bool = False) -> list[Finding]:
    """All findings, in the order of the checks; `settings` are of a training, or why they cannot be read."""
    checks = [*CHECKS, *([_VLLM] if vllm else [])]
    if pair.cross_tokenizer:  # instead of what compares ids
        of_ids = {"tokenizers", "vocabularies"}
        checks = [one for one in checks if of_ids.isdisjoint((one.name, *one.needs))]
        checks.append(Probe("tokenizers", same_texts, needs=_BOTH))
    sees = [role for role in ("student", "teacher") if hasattr(getattr(pair, role).processing, "image_processor")]
    checks += map(_images, sees)
    if settings:
        checks.append(
            Probe("settings", lambda pair: check_settings(settings, (pair.student.source, pair.teacher.source)))
        )
    checks.append(Probe("versions", versions))
    # stdout has the answer alone.
    return list(findings(checks, pair, lambda name: print(f"{name} ...", file=sys.stderr, flush=True)))


# ---- What is printed -------------------------------------------------------------------------------------------------

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def verdict(findings: Sequence[Finding]) -> str:
    """All findings in a sentence."""
    of = {kind: [one.name for one in findings if one.verdict == kind] for kind in _COLOURS}
    passed = f"Ready: {len(of['ok'])} of {len(findings)} checks passed"
    failed = f"Not ready: {len(of['failed'])} of {len(findings)} checks failed ({', '.join(of['failed'])})"
    told = [failed if of["failed"] else passed]
    told += [
        f"{len(of[one])} {said}" for one, said in (("warning", "with warnings"), ("skipped", "skipped")) if of[one]
    ]
    return f"{'; '.join(told)}."


def document(pair: Pair, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON."""
    return {
        "student": pair.student.source,
        "teacher": pair.teacher.source,
        "tiny": pair.tiny,
        "ready": all(one.verdict != "failed" for one in findings),
        "verdict": verdict(findings),
        "checks": [asdict(one) for one in findings],
    }


def show(pair: Pair, findings: Sequence[Finding]) -> None:
    """Prints a table and the verdict."""
    console, names = Console(), [Column(title, no_wrap=True) for title in ("check", "verdict", "s")]
    table = Table(*names, Column("finding", overflow="fold"), box=None, pad_edge=False)
    for one in findings:
        text = Text(one.verdict, _COLOURS[one.verdict])
        table.add_row(one.name, text, f"{one.seconds:4.1f}", escape(one.said))
    console.print(table)
    if pair.tiny:
        console.print(
            f"\nOf both models {LAYERS} random layers: only heads, tokenizers and templates are the real ones."
        )
    console.print(f"\n{verdict(findings)}", highlight=False)
