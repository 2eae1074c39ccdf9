"""`trl-opsd doctor`: starts a training of two models, makes checks that a training does not repeat, and takes one step.

N completion tokens · H hidden size · V vocabulary
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from trl_opsd.cli.launch import launch_options
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import read
from trl_opsd.config import OPSDConfig
from trl_opsd.data.tokenization import check_that_all_is_read
from trl_opsd.losses import Divergence, ForwardKL, GeneralizedJSD, ReverseKL, dense_divergence, streamed_divergence
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.models.checks import language_config, place_of
from trl_opsd.models.tokenizers import has_tokenizer, loaded_processing_class, text_tokenizer, tokenizer_at
from trl_opsd.teacher.checks import LOCATION_OPTIONS, teacher_loading
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import LazyLogits, OutputHead, Rollout

TEXTS = (
    ("Name a colour.", " Blue is one, and so is green."),
    ("What does a teacher do with the answers that a student has written?", " It reads them."),
    ("Why?", " Because each token of an answer is compared, one after another, with what the teacher expects."),
)
"""Prompts and completions of different lengths."""
TOKENS = 16
"""Maximum tokens of a completion."""


class Doubt(Exception):
    """Something that works, but may not be intended."""


@dataclass
class Pair:
    """The models to examine, as paths or loaded, and how a training loads them."""

    student: Any
    teacher: Any
    processing: Any
    """The student's tokenizer or processor."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the training."""
    teacher_tokenizer: Any = None
    """Where it is not loaded from the teacher's path."""
    trainer: OPSDTrainer = field(init=False)
    """Once a training has started."""

    @property
    def compares_bytes(self) -> bool:
        """Whether the tokenizers differ, so that targets are no states of tokens."""
        return self.options.get("cross_tokenizer") is not None

    @property
    def tokenizer(self) -> Any:
        """The student's."""
        return text_tokenizer(self.processing)

    @property
    def tokenizer_of_teacher(self) -> Any:
        """Its own, to be compared with the student's; `None` where it has none."""
        if not isinstance(self.teacher, str):
            return self.teacher_tokenizer
        path, loading = tokenizer_at(self.teacher, self.options["teacher_model_init_kwargs"])
        options = {name: one for name, one in loading.items() if name in LOCATION_OPTIONS}
        return AutoTokenizer.from_pretrained(path, **options) if has_tokenizer(path, place_of(loading)) else None

    @property
    def rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of prompts, and of completions."""
        prompts, completions = zip(*([self._ids(text) for text in row] for row in TEXTS), strict=True)
        return [*prompts], [*completions]

    def _ids(self, text: str) -> list[int]:
        read: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if 2 * len(set(read)) > len(text.split()):
            return read
        # Fewer distinct tokens, so most words were unknown: other tokens in their place.
        ordinary = sorted(set(self.tokenizer.get_vocab().values()) - set(self.tokenizer.all_special_ids))
        return [ordinary[ord(letter) % len(ordinary)] for letter in text]

    def logits(self) -> tuple[LazyLogits, LazyLogits]:
        """Of student and teacher after each token of the completions, without gradients."""
        prompts, completions = self.rows
        trainer, read = self.trainer, partial(Rollout.of, device=self.trainer.model.device)
        # Longer prompts for a student that teaches itself, as the divergence would be 0.
        mine = read(prompts, completions)
        theirs = read([prompt * (1 + (self.student == self.teacher)) for prompt in prompts], completions)
        [teacher], head = trainer.teachers.values(), OutputHead.of(trainer.model)
        bias = None if head.bias is None else head.bias.detach()
        with torch.no_grad():
            hidden_NH = completion_hidden(trainer.model, mine, trainer.batching)[mine.counts]
            teacher_NH = teacher.targets(theirs).hidden[theirs.counts]
        student = LazyLogits(hidden_NH, replace(head, weight=head.weight.detach(), bias=bias))
        return student, LazyLogits(teacher_NH.to(hidden_NH.device), teacher.head)


def pair_of(student: str | None, teacher: str | None, file: Path | None = None) -> Pair:
    """The models of a command line, or of a file of `trl-opsd train`, in float32 and as that loads them."""
    named = {"--config": file, "--model_name_or_path": student, "--teacher_model_name_or_path": teacher}
    arguments = [part for option, value in named.items() if value for part in (option, str(value))]
    given, _ = read(arguments, OptionParser(prog="trl-opsd doctor", launch_options=launch_options()))
    config, student = given.config, str(given.model.model_name_or_path)
    teacher = config.teacher_model_name_or_path or (config.teacher_model_kind and student)
    if teacher is None:
        raise ValueError("expected STUDENT and TEACHER, or a --config FILE that sets both.")
    mine, trusts = config.model_init_kwargs or {}, config.trust_remote_code
    theirs = {"trust_remote_code": trusts, **mine} if config.teacher_model_kind else teacher_loading(config)
    language_config(student, "student", mine)
    disable_progress_bar()
    return Pair(
        student,
        teacher,
        loaded_processing_class(student, mine, trusts),
        {
            "cross_tokenizer": config.cross_tokenizer,
            "trust_remote_code": trusts,
            "model_init_kwargs": _kept(mine),
            "teacher_model_init_kwargs": _kept(theirs),
        },
    )


def _kept(loading: dict[str, Any]) -> dict[str, Any]:
    is_exact = loading.get("attn_implementation") in ("eager", "sdpa")  # the others do not compute in float32
    names = (*LOCATION_OPTIONS, *["attn_implementation"] * is_exact)
    return {"dtype": "float32", **{name: loading[name] for name in names if loading.get(name) is not None}}


# ---- The training ----------------------------------------------------------------------------------------------------


def start(pair: Pair, folder: str) -> str:
    """A training starts: tokenizers, vocabularies, end token, heads, padding and gradients are as it needs them."""
    rows = {"prompt": pair.tokenizer.batch_decode(pair.rows[0])}
    given = {"max_completion_length": TOKENS, "top_k": 1, "optim": "sgd", **pair.options}
    if pair.compares_bytes:  # of a text, as what a model generates may be none
        rows = dict(zip(("prompt", "completion"), zip(*TEXTS, strict=True), strict=True))
        given |= {"lmbda": 0.0, "max_completion_length": 128}
    config = OPSDConfig(
        output_dir=folder, report_to="none", bf16=False, max_steps=1, use_cpu=not torch.accelerator.is_available(),
        disable_tqdm=True, per_device_train_batch_size=len(TEXTS), gradient_accumulation_steps=1, logging_steps=1,
        save_strategy="no", **given,
    )  # fmt: skip
    pair.trainer = trainer = OPSDTrainer(
        model=pair.student,
        teacher_model=pair.teacher,
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=pair.processing,
        teacher_processing_class=pair.teacher_tokenizer,
    )
    trainer.model.eval()
    if pair.tokenizer_of_teacher is None:
        raise Doubt("The teacher has no tokenizer to compare: it is assumed to use the student's.")
    sizes = trainer.limits.vocabulary, trainer.teachers.heads[0].weight.size(0)
    return f"Heads of {sizes[0]} and {sizes[1]} rows; {len(pair.tokenizer.get_vocab())} tokens."


def step(pair: Pair) -> str:
    """A training takes a step."""
    pair.trainer.train()
    logged = pair.trainer.state.log_history[0]
    if (used := logged.get("cross/used")) is not None:
        said = f"{used:.0%} of the text of three rows can be compared."
        if used < 0.5:
            raise Doubt(f"{said} The rest is left out: see docs/tokenizers.md.")
        return said
    return f"A divergence of {logged['divergence/mean']:.4g} nats, a gradient of norm {logged['grad_norm']:.4g}."


# ---- The chat template -----------------------------------------------------------------------------------------------

_QUESTION = {"role": "user", "content": "A question."}
_ANSWER = {"role": "assistant", "content": "An answer."}


def template(pair: Pair) -> str:
    """The chat template writes all that the user says, opens the answer, and closes it with an end token."""
    mine, theirs = pair.tokenizer, pair.tokenizer_of_teacher
    if mine.chat_template is None:
        raise Doubt("The tokenizer has no chat template: prompts have to be text, not conversations.")

    def rendered(*messages: dict[str, str], by: Any = mine, opened: bool = True) -> str:
        return str(by.apply_chat_template([*messages], tokenize=False, add_generation_prompt=opened))

    check_that_all_is_read([_QUESTION, _ANSWER, _QUESTION], lambda marked: rendered(*marked), "A conversation")
    opening = rendered(_QUESTION).removeprefix(rendered(_QUESTION, opened=False))
    if not opening:
        raise ValueError("The chat template ignores `add_generation_prompt`: use that of an instruct model.")
    same = pair.compares_bytes or not getattr(theirs, "chat_template", None)
    if not same and rendered(_QUESTION, by=theirs) != rendered(_QUESTION):
        raise Doubt("The teacher's chat template differs, and the student's is used for both.")
    after = rendered(_QUESTION, _ANSWER, opened=False).rpartition(_ANSWER["content"])[2]
    ends = mine.convert_ids_to_tokens(pair.trainer.eos_token_ids)
    if not any(token in after for token in ends):
        raise Doubt(
            f"After an answer the chat template renders {after!r}, which contains no end token ({', '.join(ends)}): "
            "completions may run to their limit."
        )
    return f"Opens an answer with {opening!r}."


# ---- The loss of this pair against its reference in float64 ----------------------------------------------------------

_DIVERGENCES = {"forward_kl": ForwardKL(), "reverse_kl": ReverseKL(), "jsd": GeneralizedJSD(0.5)}
_ROUNDING = 1e-4
"""Largest difference, relative to the largest value, that the order of float32 sums explains."""
_NOTHING = 0.1
"""Lower bound of the value a difference is relative to: between models that agree all is rounding."""


def loss(pair: Pair) -> str:
    """Values and gradients equal those of the reference, for any number of tokens at a time."""
    mine, yours, said = *pair.logits(), []
    for name, divergence in _DIVERGENCES.items():
        expected = _reference(mine, yours, divergence, pair.trainer.teaching.vocabulary)
        for chunk in (1, 7, None):  # the smallest tile, one that divides nothing, and all tokens
            found = _compared(mine, yours, divergence, chunk, pair.trainer.teaching.vocabulary)
            pairs = zip(found, expected, strict=True)
            gaps = [(one - exact).abs().max() / exact.abs().max().clamp(min=_NOTHING) for one, exact in pairs]
            if not (gap := float(torch.stack(gaps).max())) <= _ROUNDING:  # not `>`: NaN has to fail, too
                raise ValueError(
                    f"`{name}` in tiles of {chunk or 'all'} tokens is off by {gap:.2g} of the largest value."
                )
        said.append(f"{name} {expected[0].mean():.4g}")
    return f"Equal to float64 for any `loss_chunk_tokens`: {', '.join(said)} nats."


def _compared(
    mine: LazyLogits, yours: LazyLogits, divergence: Divergence, chunk: int | None, vocabulary: int | None
) -> tuple[Tensor, Tensor]:
    """[N] and [N, H], a divergence and its gradient with respect to the student's states."""
    student = replace(mine, hidden=mine.hidden.clone().requires_grad_())
    value_N = streamed_divergence(student, yours, divergence, chunk_tokens=chunk, vocabulary=vocabulary).divergence
    (gradient_NH,) = torch.autograd.grad(value_N.sum(), student.hidden)
    return value_N.detach(), gradient_NH


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


# ---- All, in their order ---------------------------------------------------------------------------------------------

Verdict = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    name: str
    verdict: Verdict
    said: str


def examine(pair: Pair) -> list[Finding]:
    """All findings, in the order of the checks; the others need that the training has started."""
    found: list[Finding] = []
    with TemporaryDirectory(prefix="trl_opsd-doctor-") as folder:
        checks: dict[str, Callable[[Pair], str]] = {"start": partial(start, folder=folder), "chat template": template}
        checks |= {} if pair.compares_bytes else {"loss": loss}
        checks["step"] = step  # last, as it changes the student
        for name, check in checks.items():
            print(name, file=sys.stderr, flush=True)  # stdout has the answer alone
            is_vain = found and found[0].verdict == "failed"
            found.append(Finding(name, "skipped", "Needs: start.") if is_vain else _tried(name, check, pair))
    return found


def _tried(name: str, check: Callable[[Pair], str], pair: Pair) -> Finding:
    verdict: Verdict = "ok"
    try:
        said = check(pair)
    except Doubt as doubt:
        verdict, said = "warning", str(doubt)
    except Exception as error:  # whatever a model raises is a finding
        verdict, said = "failed", str(error) or type(error).__name__
    return Finding(name, verdict, " ".join(said.split()))


def document(pair: Pair, findings: Sequence[Finding]) -> dict[str, Any]:
    """What is printed: the findings, and whether a training can start."""
    return {
        "student": pair.student,
        "teacher": pair.teacher,
        "checks": [asdict(one) for one in findings],
        "ready": all(one.verdict != "failed" for one in findings),
    }
