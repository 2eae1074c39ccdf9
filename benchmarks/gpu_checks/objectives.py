"""The loss with a third model, and by bytes: errors against float64, and time over that of the plain loss."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import loss
import torch
from datasets import Dataset
from support import tiny
from support.byte_languages import byte_pairs
from timing import median

from gpu_checks.findings import Findings
from gpu_checks.losses import SHARED, SHARED_TOY, sizes
from gpu_checks.pictures import trained
from trl_opsd import FixedRollout
from trl_opsd.bytes.covering import Cutter, Nodes
from trl_opsd.bytes.divergence import Bytewise, byte_logarithms
from trl_opsd.bytes.table import Spelled, byte_head
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.losses import ReverseKL, dense_divergence, streamed_divergence
from trl_opsd.types import LazyLogits, ReferenceModel, Sampled

THIRD = 1.8
"""Time with a contrast over that without. A second teacher's states are one more T and another 8 bytes written and read
of each logit: 37 + 11 + 7 ms are 1.5 of it."""
BYTES = 3.0
"""Time by bytes over that by tokens: 3S, and 46 bytes moved for each logit, are computed as about 40 ms, over 37."""

LICENSE = Path(__file__).parents[2] / "LICENSE"
"""The text that rows have, and that both tokenizers have learned."""


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
    _loss_by_bytes(found)
    _forks(found)


def _forks(found: Findings) -> None:
    """Steps in which both models are read where their tokens may part from the text's, and in which they are not."""
    mine, yours = byte_pairs(700, start=3000), byte_pairs(900)
    rows, letters, width = (4, 1000, 512) if found.full else (2, 40, 32)
    text, prompts = LICENSE.read_text(), [f"Question {row}" for row in range(rows)]
    texts = [text[letters * row :][:letters] for row in range(rows)]
    written = zip(map(tuple, mine(prompts)["input_ids"]), mine(texts)["input_ids"], strict=True)
    recorded, times, losses = dict(written), {}, {}
    for name, missed, use_cpu in (("forks", 0.01, False), ("no forks", 1.0, False), ("forks, on the CPU", 0.01, True)):
        options = {"cross_tokenizer": "bytes", "cross_tokenizer_missed": missed, "max_completion_length": letters}
        trainer = trained(
            use_cpu or not found.on_gpu,
            {**options, "per_device_train_batch_size": rows},
            model=tiny.qwen2(width, vocab_size=len(mine), max_position_embeddings=2048),
            teacher_model=tiny.qwen2(width, 1, vocab_size=len(yours), max_position_embeddings=2048),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=mine,
            teacher_processing_class=yours,
            rollout=FixedRollout(recorded),
        )
        losses[name], times[name] = tiny.logged(trainer, "loss"), min(tiny.logged(trainer, "step_time")[1:])
        found.note(f"steps by bytes, {name}: time", 1e3 * times[name], "ms")
        if name == "forks":
            found.at_least("forks of each of the student's tokens", tiny.logged(trainer, "cross/forks")[-1], 1e-3)
    gap = max(abs(a - b) / b for a, b in zip(losses["forks"], losses["forks, on the CPU"], strict=True))
    found.at_most("forks: difference of the losses, relative to the CPU's", gap, 1e-3)
    found.note("forks: time of a step over that without", times["forks"] / times["no forks"])


def _loss_by_bytes(found: Findings) -> None:
    """A student of another tokenizer than its teacher's, and a vocabulary of full size: the time of the loss."""
    device, generator = torch.device(found.device), torch.Generator().manual_seed(0)
    texts: set[bytes] = {bytes([one]) for one in range(256)}
    while len(texts) < (SHARED[2] if found.full else SHARED_TOY[2] + 256):
        texts.add(bytes(torch.randint(97, 123, (int(torch.randint(2, 9, (), generator=generator)),)).tolist()))
    vocabulary = ByteVocabulary(SimpleNamespace(), (None, *sorted(texts)), frozenset({0}))  # type: ignore[arg-type]
    args = sizes(found, vocab=len(texts) + 1)
    student, teacher = loss.make_pair(args, args.tokens, False)
    ids = torch.randint(1, args.vocab, (args.tokens,), generator=generator)
    (tree,) = Alone(vocabulary).trees([ids.tolist()])
    spelled = Spelled.of([tree], [torch.zeros(len(tree.token))], [0], torch.arange(args.tokens))
    logs, _ = byte_logarithms(student, vocabulary.table, ids.to(device), spelled)
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
