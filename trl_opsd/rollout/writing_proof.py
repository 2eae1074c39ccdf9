"""Determines by trial how a student can generate: each row must get the logits of a forward pass on that row alone.

A model may be right in a forward pass and still wrong in `generate`: it counts positions differently, keeps state that
is not updated when rows leave the batch, or continues from the state of the previous call.

T tokens written · V logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd.models.padding import PADDED, Reading, agree
from trl_opsd.rollout.decode import RaggedDecoding, obstacle
from trl_opsd.rollout.generate import generate
from trl_opsd.run.precision import least_precise

_TOKENS = 3
"""Tokens to generate; another row leaves the batch after the first."""
_FAILS = (AttributeError, TypeError, ValueError, LookupError, AssertionError)
BY_LENGTH, ALONE = Reading(0), Reading(0, batches_equal_lengths=False)
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Writing:
    """How a student generates a batch so that each row gets what it would get alone."""

    together: Reading = PADDED
    """Which prompts share a batch."""
    rows_leave: bool = True
    """Whether a row may leave the batch when it has ended."""
    cached_from: int = 1
    """Prompts shorter than this are continued without a cache: each token re-reads the whole row."""

    def __str__(self) -> str:
        how = str(self.together)
        if self.cached_from == _NEVER:
            how += ", without a cache"
        elif self.cached_from > 1:
            how += f", and prompts of fewer than {self.cached_from} tokens without a cache"
        return how


def prove_writing(student: CausalLM, reading: Reading, vocabulary: int, collective: bool) -> Writing:
    """Tries the ways to generate, from the fastest on.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, ready to generate.
        reading ([`~models.padding.Reading`]):
            Which rows it reads together; no others are generated together.
        vocabulary (`int`):
            Token ids to choose from.
        collective (`bool`):
            Whether forwards are collective.

    Raises:
        ValueError: Its `generate` cannot continue a single prompt, or computes other logits than a forward pass.
    """
    with _default_generation_config(student):
        return _proved(student, reading, vocabulary, collective)


def _proved(student: CausalLM, reading: Reading, vocabulary: int, collective: bool) -> Writing:
    prompt, other = [vocabulary // 3, vocabulary // 4, vocabulary // 5], [vocabulary // 2, vocabulary // 6]
    single_TV = _read(student, other[:1], vocabulary)
    cached, alone_TV = _alone(student, prompt, vocabulary)
    # Right after it, since some models take a prompt of one token for a continuation of the previous call.
    from_one = cached and _writes(student, [other[:1]], vocabulary, None, cached, single_TV)
    cached_from = _NEVER if not cached else 1 if from_one else 2
    loops: list[Callable[[], Any]] = [lambda: None]
    if cached and obstacle(student, _config(cached)) is None:
        loops.insert(0, lambda: RaggedDecoding(rooms=[1, _TOKENS], context=None, collective=collective))
    for kind in _kinds(reading):
        beside = [*prompt, *other, *other] if kind.padded_up_to else [*other, other[0]]
        for loop in loops:
            if _writes(student, [beside, prompt], vocabulary, loop(), cached, alone_TV):
                return Writing(kind, len(loops) > 1 and loop is loops[0], cached_from)
    return Writing(ALONE, False, cached_from)


def _alone(student: CausalLM, prompt: list[int], vocabulary: int) -> tuple[bool, Tensor]:
    """Whether a prompt can be continued with a cache, and the logits `[T, V]`."""
    read_TV = _read(student, prompt, vocabulary)
    why, cause = "its logits differ from those of a forward pass", None
    for cached in (True, False):
        try:
            alone_TV = _logits(student, [prompt], vocabulary, None, cached)
        except _FAILS as error:  # not a RuntimeError, which may be a hardware fault
            why, cause = f"{type(error).__name__}: {error}", error
        else:
            if agree(alone_TV, read_TV):
                return cached, alone_TV
    raise ValueError(
        f"`generate` of {type(_bare(student)).__name__} cannot continue three tokens by three, with or without a "
        f"cache: {why}. Use another model, or pass a `rollout` that can generate with it."
    ) from cause


def _read(student: CausalLM, prompt: list[int], vocabulary: int) -> Tensor:
    """[T, V], the logits for the forced tokens after a prompt, from one forward pass."""
    device = student.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *(vocabulary // 2 + number for number in range(_TOKENS - 1))]], device=device)
    with torch.no_grad():
        logits_TV = student(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -_TOKENS:]
    read_TV: Tensor = logits_TV.to(least_precise(_bare(student)))
    return read_TV


def _writes(
    student: CausalLM, prompts: list[list[int]], vocabulary: int, loop: Any, cached: bool, alone_TV: Tensor
) -> bool:
    try:
        return agree(_logits(student, prompts, vocabulary, loop, cached), alone_TV)
    except torch.OutOfMemoryError:
        raise
    except (*_FAILS, RuntimeError):  # a RuntimeError about shapes: the prompt alone has just worked
        return False


def _kinds(reading: Reading) -> Iterator[Reading]:
    """The ways to batch that `reading` allows, the fastest first."""
    if reading.padded_up_to:
        yield reading
    if reading.batches_equal_lengths:
        yield BY_LENGTH


@contextmanager
def _default_generation_config(student: CausalLM) -> Iterator[None]:
    """Hides the checkpoint's own generation config: its beams or caches are not properties of the architecture."""
    bare = _bare(student)
    own, bare.generation_config = bare.generation_config, GenerationConfig()
    try:
        yield
    finally:
        bare.generation_config = own


def _bare(student: CausalLM) -> Any:
    return without_peft(student)


def _config(cached: bool) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=[],
        use_cache=cached,
        disable_compile=True,
    )


def _logits(student: CausalLM, prompts: list[list[int]], vocabulary: int, loop: Any, cached: bool) -> Tensor:
    """[T, V], the logits for the last prompt in a left-padded batch."""
    longest = max(map(len, prompts))
    device = student.get_input_embeddings().weight.device
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=device)
    logits: list[Tensor] = []
    # Not with a logits processor: those of the model's own generation config come first, and may depend on padding.
    bare = _bare(student)
    rounded = least_precise(bare)
    hook = bare.register_forward_hook(
        lambda module, args, output: logits.append(output.logits[-1, -1].to(rounded, copy=True))
    )
    try:
        generate(
            student,
            {"input_ids": ids, "attention_mask": mask},
            _config(cached),
            logits_processor=LogitsProcessorList([_ForcedTokens(longest, vocabulary)]),
            custom_generate=loop,
        )
    finally:
        hook.remove()
    return torch.stack(logits[:_TOKENS])


class _ForcedTokens(LogitsProcessor):
    """Makes every row generate the same tokens."""

    def __init__(self, prompt_tokens: int, vocabulary: int) -> None:
        self._first = vocabulary // 2 - prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._first + input_ids.size(1)] = 0.0
        return forced
