"""The loss with a third model, and by bytes: errors against float64, and time over that of the plain loss."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import loss
import torch
from support.byte_languages import dense_byte_logarithms
from timing import median

from gpu_checks.findings import Findings
from gpu_checks.losses import SHARED, SHARED_TOY, sizes
from trl_opsd.bytes.covering import Cutter, Nodes
from trl_opsd.bytes.divergence import Bytewise, byte_logarithms
from trl_opsd.bytes.table import Spelled, byte_head
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.losses import ReverseKL, dense_divergence, streamed_divergence
from trl_opsd.types import LazyLogits, ReferenceModel, Sampled

THIRD = 1.8
"""Time with a contrast over that without. A second teacher's states are one more T and another 8 bytes written and read
of each logit: 37 + 11 + 7 ms are 1.5 of it."""
FLOOR = 1e-6
"""Added to the probability of each outcome."""
BYTES = 3.0
"""Time by bytes over that by tokens: 3S, and 46 bytes moved for each logit, are computed as about 40 ms, over 37."""


def contrast(found: Findings) -> None:
    """The teacher's target, moved away from what it says in another context, and an anchor to the student's origin."""
    for frozen in (False, True):
        args = sizes(found, dtype=torch.float32, tokens=32)
        given = _beside(args, anchor=0.1)
        for name, one in {"streamed": streamed_divergence, "dense": dense_divergence}.items():
            student, teacher = loss.make_pair(args, 32, frozen)
            program = partial(one, divergence=ReverseKL(), references=given)
            value, gradients = loss.step(lambda *pair, run=program: run(*pair).divergence, student, teacher)
            if name == "streamed":
                ours = (value, *gradients)
        truths = (value, *gradients)
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, truths, strict=True))
        head = "frozen head" if frozen else "trained head"
        found.at_most(f"contrast and anchor, float32, {head}: error of value and gradients", error, 1e-4)
    device, args = torch.device(found.device), sizes(found)
    pair, seconds = loss.make_pair(args, args.tokens, False), {}
    for name, given in {"alone": [], "contrast": _beside(args), "clipped": _beside(args, bound=2.0)}.items():
        program = partial(streamed_divergence, divergence=ReverseKL(), references=given)
        run = partial(loss.step, lambda *pair, run=program: run(*pair).divergence, *pair)
        seconds[name] = median(run, device, repeats=5 if found.full else 1, warm_ups=2)
        found.note(f"{name}: time", 1e3 * seconds[name], "ms")
    for name in ("contrast", "clipped"):
        found.at_most(f"{name}: time over that without", seconds[name] / seconds["alone"], THIRD, only_gpu=True)


def _beside(args: argparse.Namespace, bound: float | None = None, anchor: float = 0.0) -> list[ReferenceModel]:
    """Other states of the teacher, and with an anchor those of the student before."""
    others = argparse.Namespace(**{**vars(args), "student_width": args.teacher_width})
    student, teacher = loss.make_pair(others, args.tokens, True)
    found = [ReferenceModel(replace(teacher, hidden=student.hidden.detach()), push=0.5, bound=bound)]
    if anchor:
        origin, _ = loss.make_pair(args, args.tokens, True)
        found.append(ReferenceModel(replace(origin, hidden=origin.hidden.detach() + 0.1), anchor=anchor))
    return found


# ---- By bytes -------------------------------------------------------------------------------------------------------


class Alone(Cutter):
    """Reads the text's own tokens alone: a random vocabulary has no tokenizer that tells others."""

    def _nodes(self, regions: Sequence[bytes]) -> list[Nodes]:
        return [Nodes() for _ in regions]


def by_bytes(found: Findings) -> None:
    """A student of another tokenizer than its teacher's: next-byte distributions against float64, and their time."""
    device, generator = torch.device(found.device), torch.Generator().manual_seed(0)
    texts: set[bytes] = {bytes([one]) for one in range(256)}
    while len(texts) < (SHARED[2] if found.full else SHARED_TOY[2] + 256):
        texts.add(bytes(torch.randint(97, 123, (int(torch.randint(2, 9, (), generator=generator)),)).tolist()))
    few = sorted(texts)[:: max(1, len(texts) // 300)]
    for some, tokens, dtype in ((few, 24, torch.float32), (sorted(texts), 8192 if found.full else 64, torch.bfloat16)):
        vocabulary = ByteVocabulary(SimpleNamespace(), (None, *some), frozenset({0}))  # type: ignore[arg-type]
        args = sizes(found, tokens=tokens, vocab=len(some) + 1, dtype=dtype)
        student, teacher = loss.make_pair(args, tokens, False)
        ids = torch.randint(1, args.vocab, (tokens,), generator=generator)
        (tree,) = Alone(vocabulary).trees([ids.tolist()])
        spelled = Spelled.of([tree], [torch.zeros(len(tree.token))], [0], torch.arange(tokens))
        logs, _ = byte_logarithms(student, vocabulary.table, ids.to(device), spelled)
        if dtype == torch.float32:
            logits = (student.hidden.detach().double() @ student.head.weight.detach().double().T).cpu()
            begins = torch.searchsorted(torch.from_numpy(tree.token), torch.arange(tokens)).tolist()
            nodes = [(place, [(one, int(ids[one])) for one in range(at)]) for at, place in enumerate(begins)]
            outcomes = [byte for one in vocabulary.spelled(ids.tolist()) for byte in one or ()]
            expected = dense_byte_logarithms(logits, vocabulary.texts, outcomes, nodes, FLOOR)
            error = float((logs.cpu() - expected).abs().max())
            found.at_most("by bytes, float32: error of logarithms", error, 1e-4, "nats")
    given = ReverseKL(), vocabulary.table, spelled, Sampled(ids.to(device)), None, 1.0
    programs = {
        "bytes": lambda one, other: (
            Bytewise(one, LazyLogits(logs, byte_head(device)), *given).compared(None).divergence
        ),
        "tokens": lambda one, other: streamed_divergence(one, other, ReverseKL()).divergence,
    }
    repeats = 3 if found.full else 1
    seconds = {
        name: median(partial(loss.step, run, student, teacher), device, repeats) for name, run in programs.items()
    }
    for name, spent in seconds.items():
        found.note(f"loss by {name}: time", 1e3 * spent, "ms")
    found.at_most("loss by bytes: time over that by tokens", seconds["bytes"] / seconds["tokens"], BYTES, only_gpu=True)
