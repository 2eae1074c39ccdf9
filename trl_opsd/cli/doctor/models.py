"""Checks of each model by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl_opsd.cli.doctor.pair import Pair, Side
from trl_opsd.cli.doctor.verdicts import Doubt
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.models.head import prove_head
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.models.reading_proof import prove_padding
from trl_opsd.models.training_proof import prove_training
from trl_opsd.run.rng import preserved_rng
from trl_opsd.types import Rollout

_TEXTS = (
    ("Name a colour.", " Blue is one, and so is green."),
    ("What does a teacher do with the answers that a student has written?", " It reads them."),
    ("Why?", " Because each token of an answer is compared, one after another, with what the teacher expects."),
)
"""Prompts and completions of different lengths."""
_ALIKE = 1e-5
"""Largest difference between states, relative to the largest value, that float32 rounding explains."""


def written(pair: Pair, prompts_twice: bool = False) -> Rollout:
    """Three rows as a student generates them; or, with longer prompts, as a teacher reads them."""
    rows = texts(pair.student.tokenizer)
    prompts, prompt_mask = _padded([prompt[::-1] * (1 + prompts_twice) for prompt, _ in rows], pair.device)
    completions, mask = _padded([completion for _, completion in rows], pair.device)
    return Rollout(
        prompt_ids=prompts.flip(1),
        prompt_mask=prompt_mask.flip(1),
        completion_ids=completions,
        completion_mask=mask,
        weights=mask.float(),
    )


def texts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and completions; other tokens in their place, if the tokenizer does not know the words."""
    ordinary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))

    def ids(text: str) -> list[int]:
        read: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if 2 * len(set(read)) > len(text.split()):  # fewer distinct tokens: most words were unknown
            return read
        return [ordinary[ord(letter) % len(ordinary)] for letter in text]

    return [(ids(prompt), ids(completion)) for prompt, completion in _TEXTS]


def student_head(pair: Pair) -> str:
    """The student's logits can be rebuilt from its hidden states."""
    return _head(pair.student, "student")


def teacher_head(pair: Pair) -> str:
    """The teacher's logits can be rebuilt from its hidden states."""
    return _head(pair.teacher, "teacher")


def student_padding(pair: Pair) -> str:
    """Rows of different lengths can share a batch of the student, or it is known which can."""
    return _padding(pair.student, "student")


def teacher_padding(pair: Pair) -> str:
    """The same of the teacher."""
    return _padding(pair.teacher, "teacher")


def gradients(pair: Pair) -> str:
    """Gradients reach the student's weights."""
    with preserved_rng(pair.device):
        unreached = prove_training(pair.student.model)
    if unreached:
        raise Doubt(f"No gradient reaches {len(unreached)} parameters, the first {unreached[0]!r}.")
    return "Reach all weights below the head."


@torch.no_grad()
def repeats(pair: Pair) -> str:
    """The teacher's logits are the same in a second forward pass."""
    model, rows = pair.teacher.model, pair.teacher.model.get_output_embeddings().weight.size(0)
    ids_BL = torch.arange(16, device=pair.device).mul(rows // 16)[None]
    # NaN is a finding of other checks; here it would differ from itself.
    first, again = (model(input_ids=ids_BL, use_cache=False).logits.float().nan_to_num() for _ in range(2))
    gap = float((first - again).abs().max() / first.abs().max().clamp(min=1e-30))
    if gap > _ALIKE:
        raise ValueError(
            f"The teacher's logits differ by {gap:.1e} of the largest between two readings of the same tokens: it "
            "draws random numbers, or keeps something from the first reading."
        )
    return "Twice the same, bit for bit." if gap == 0 else f"Twice the same, but for {gap:.0e} of the largest."


def depends_on_input(pair: Pair) -> str:
    """The teacher's states depend on what it reads."""
    rollout = written(pair)
    states_NH = states(pair.teacher, rollout, reading_of(pair.teacher, "teacher"))[rollout.counts]
    spread, largest = (states_NH - states_NH.mean(0)).abs().max(), states_NH.abs().max()
    if spread < _ALIKE * largest:
        raise ValueError(
            f"The teacher has the same hidden state at all {len(states_NH)} tokens, whatever it reads: its weights are "
            "zeroed or were not loaded; load it again."
        )
    return f"States differ by up to {spread / largest:.2g} of the largest value, token by token."


def reading_of(side: Side, role: str) -> Reading:
    """Which rows a model reads in one batch."""
    with torch.no_grad():
        return prove_padding(side.model, role)


@torch.no_grad()
def states(side: Side, rollout: Rollout, reading: Reading = PADDED) -> Tensor:
    """[B, C, H], the last hidden states that predict each completion token."""
    return completion_hidden(side.model, rollout, reading)


def _head(side: Side, role: str) -> str:
    prove_head(side.model, role)
    weight = side.model.get_output_embeddings().weight
    return f"Logits rebuilt from states of width {weight.size(1)}, {type(side.model).__name__}."


def _padding(side: Side, role: str) -> str:
    reading = reading_of(side, role)
    return "Rows share a batch." if reading.padded_up_to == math.inf else "Rows are read by length, without padding."


def _padded(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, L], token ids and mask, padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask
