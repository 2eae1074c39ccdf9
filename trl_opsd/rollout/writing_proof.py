"""Finds out by trying how a student can write a batch: a row must get the logits that it gets alone.

A family may read padded rows rightly and still write them wrongly: its `generate` counts positions otherwise, or it
keeps states where rows that leave the batch are not known.

T tokens written · V logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from trl_opsd.padding import Reading, agree
from trl_opsd.precision import least_precise
from trl_opsd.rollout.decode import RaggedDecoding, obstacle

_TOKENS = 3
"""So many are written; another row leaves the batch after the first."""
_FAILS = (AttributeError, TypeError, ValueError, LookupError, AssertionError)
BY_LENGTH, ALONE = Reading(0), Reading(0, shares=False)


def prove_writing(student: Any, reading: Reading, vocabulary: int, synced: bool) -> tuple[Reading, bool]:
    """Which prompts can share a batch, and whether rows may leave it.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, ready to generate.
        reading ([`~padding.Reading`]):
            Which rows it reads together; it writes no others together.
        vocabulary (`int`):
            Token ids to choose from.
        synced (`bool`):
            Whether a forward pass is collective.

    Returns:
        `tuple[Reading, bool]`: which prompts share a batch, and whether rows may leave it.

    Raises:
        ValueError: Its `generate` does not even continue one prompt.
    """
    with _without_options_of_its_own(student):
        return _proved(student, reading, vocabulary, synced)


def _proved(student: Any, reading: Reading, vocabulary: int, synced: bool) -> tuple[Reading, bool]:
    prompt, other = [vocabulary // 3, vocabulary // 4, vocabulary // 5], [vocabulary // 2, vocabulary // 6]
    loops: list[Callable[[], Any]] = [lambda: None]
    if obstacle(student, _config()) is None:
        loops.insert(0, lambda: RaggedDecoding(rooms=[1, _TOKENS], context=None, synced=synced))
    try:
        alone_TV = _logits(student, [prompt], vocabulary, None)
    except _FAILS as error:  # not a RuntimeError, which may be the machine's
        raise ValueError(
            f"`generate` of {type(student).__name__} cannot continue three tokens by three, {type(error).__name__}: "
            f"{error}. Take another model, or pass a `rollout` that can let it write."
        ) from error
    for kind in _kinds(reading):
        beside = [*prompt, *other, *other] if kind.padded_up_to else [*other, other[0]]
        for loop in loops:
            if _writes(student, [beside, prompt], vocabulary, loop(), alone_TV):
                return kind, len(loops) > 1 and loop is loops[0]
    return ALONE, False


def _writes(student: Any, prompts: list[list[int]], vocabulary: int, loop: Any, alone_TV: Tensor) -> bool:
    try:
        return agree(_logits(student, prompts, vocabulary, loop), alone_TV)
    except torch.OutOfMemoryError:
        raise
    except (*_FAILS, RuntimeError):  # of shapes: this prompt alone was just written
        return False


def _kinds(reading: Reading) -> Iterator[Reading]:
    """From the fastest that `reading` allows on."""
    if reading.padded_up_to:
        yield reading
    if reading.shares:
        yield BY_LENGTH


@contextmanager
def _without_options_of_its_own(student: Any) -> Iterator[None]:
    """Beams, returned sequences or caches that a checkpoint asks for say nothing of the architecture."""
    bare = _bare(student)
    own, bare.generation_config = bare.generation_config, GenerationConfig()
    try:
        yield
    finally:
        bare.generation_config = own


def _bare(student: Any) -> Any:
    return student.get_base_model() if is_peft_model(student) else student


def _config() -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=[], disable_compile=True
    )


def _logits(student: Any, prompts: list[list[int]], vocabulary: int, loop: Any) -> Tensor:
    """[T, V], of the last prompt in a batch that is padded on the left."""
    longest = max(map(len, prompts))
    device = student.get_input_embeddings().weight.device
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=device)
    logits: list[Tensor] = []
    # Not by a logits processor: those of the model's own generation config come before, and may look at padding.
    bare = _bare(student)
    rounded = least_precise(bare)
    hook = bare.register_forward_hook(
        lambda module, args, output: logits.append(output.logits[-1, -1].to(rounded, copy=True))
    )
    try:
        student.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=_config(),
            logits_processor=LogitsProcessorList([_Dictation(longest, vocabulary)]),
            custom_generate=loop,
        )
    finally:
        hook.remove()
    return torch.stack(logits[:_TOKENS])


class _Dictation(LogitsProcessor):
    """Has every row write the same tokens."""

    def __init__(self, prompt_tokens: int, vocabulary: int) -> None:
        self._first = vocabulary // 2 - prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._first + input_ids.size(1)] = 0.0
        return forced
