"""Calls a model's `generate`, and determines by trial in which batches each row gets the logits that it gets alone.

A model may be right in a forward pass and still wrong in `generate`: it counts positions differently, keeps state that
is not updated when rows leave the batch, or continues from the state of the previous call.

T generated tokens · V logits
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.versions import replaced
from trl_opsd.models.padding import PADDED, BatchPolicy, agree
from trl_opsd.parallel.precision import least_precise
from trl_opsd.rollout.decode import RaggedDecoding, obstacle

_TOKENS = 3
"""Tokens that the trial generates; another row leaves the batch after the first."""
_FAILS = (AttributeError, TypeError, ValueError, LookupError, AssertionError)
BY_LENGTH, _ALONE = BatchPolicy(0), BatchPolicy(0, batches_equal_lengths=False)


def generate(model: CausalLM, inputs: dict[str, Tensor], config: GenerationConfig, **extras: Any) -> Any:
    """Calls `model.generate` with `[B, P]` inputs; `extras` that this `generate` does not accept are omitted."""
    parameters = inspect.signature(model.generate).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    taken = {name: value for name, value in extras.items() if takes_any or name in parameters}
    head = model.get_output_embeddings()
    hook = None if head is None else head.register_forward_pre_hook(_made_contiguous)
    try:
        return model.generate(**inputs, generation_config=config, **taken)
    finally:
        if hook is not None:
            hook.remove()


def _made_contiguous(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # In a prefill the last states are a view, `hidden[:, -1:]`. Where the head needs no gradient, as below an adapter
    # or after a cast, `torch.matmul` would copy it for each row, to multiply row by row (`bmm`). Through one dimension,
    # because `contiguous` keeps the strides of a single row, which `matmul` looks at.
    return tuple(one.flatten().view(one.shape) if isinstance(one, Tensor) else one for one in inputs)


def completions_of(returned: Any, prompt_ids: Tensor, max_new_tokens: int, name: str) -> list[list[int]]:
    """The completions in the result of a plain `generate`; anything but ids that begin with the prompts is an error."""
    ids, tokens = getattr(returned, "sequences", returned), prompt_ids.size(1)
    if not ids[:, :tokens].equal(prompt_ids.to(ids.device)) or ids.size(1) > tokens + max_new_tokens:
        raise ValueError(
            f"`generate` of {name} returned other rows than the prompts and at most {max_new_tokens} tokens after each."
        )
    return ids[:, tokens:].tolist()


# ---- The trial -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batching:
    """How a model generates a batch so that each row gets what it would get alone."""

    together: BatchPolicy = PADDED
    """Which prompts share a batch."""
    rows_stay: str | None = None
    """Why rows stay in the batch until the last has ended; `None` if each leaves."""
    cached: bool = True
    """Whether there is a cache; else each token re-reads the whole row."""

    def __str__(self) -> str:
        return f"{self.together}{'' if self.cached else ', without a cache'}"


def prove_batching(model: CausalLM, policy: BatchPolicy, vocabulary: int, collective: bool) -> Batching:
    """Tries the ways to generate that `policy` allows, the fastest first; a single prompt must work."""
    # The checkpoint's own beams or caches are not properties of the architecture.
    with replaced(without_peft(model), generation_config=GenerationConfig()):
        return _proved(_Trial(model, vocabulary), policy, collective)


def _proved(trial: _Trial, policy: BatchPolicy, collective: bool) -> Batching:
    # Any different ids will do, and these exist in every vocabulary.
    prompt, other = [trial.vocabulary // part for part in (3, 4, 5)], [trial.vocabulary // part for part in (2, 6)]
    single_TV = trial.forward(other[:1])
    alone_TV = trial.alone(prompt)
    # Right after it, since some models take a prompt of one token for a continuation of the previous call.
    trial.cached = trial.cached and trial.failure([other[:1]], single_TV) is None
    loop = RaggedDecoding(max_new_tokens=[1, _TOKENS], collective=collective)
    stay = never = obstacle(trial.model, trial.config())
    for together in [*([policy] if policy.padded_up_to else []), *([BY_LENGTH] * policy.batches_equal_lengths)]:
        pair = [[*prompt, *other, *other] if together.padded_up_to else [*other, other[0]], prompt]
        stay = never or trial.failure(pair, alone_TV, loop)
        if stay is None or trial.failure(pair, alone_TV) is None:
            return Batching(together, stay, trial.cached)
    return Batching(_ALONE, stay or "each row is generated separately", trial.cached)


@dataclass
class _Trial:
    """Generates a few forced tokens, and reads the logits of the last prompt in a batch."""

    model: CausalLM
    vocabulary: int
    cached: bool = True

    def __post_init__(self) -> None:
        self._bare: Any = without_peft(self.model)
        self._rounded = least_precise(self._bare)
        self._device = self.model.get_input_embeddings().weight.device

    def forward(self, prompt: list[int]) -> Tensor:
        """[T, V], the logits for the forced tokens after a prompt, from one forward pass."""
        forced = [self.vocabulary // 2 + number for number in range(_TOKENS - 1)]
        ids = torch.tensor([[*prompt, *forced]], device=self._device)
        with torch.no_grad():
            output = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        logits_TV: Tensor = output.logits[0, -_TOKENS:].to(self._rounded)
        return logits_TV

    def alone(self, prompt: list[int]) -> Tensor:
        """[T, V], the logits of `generate` for a single prompt, without a cache if these are wrong with one."""
        read_TV = self.forward(prompt)
        why, cause = "its logits differ from those of a forward pass", None
        for cached in (True, False):
            self.cached = cached
            try:
                alone_TV = self.logits([prompt])
            except _FAILS as error:  # not a RuntimeError, which may be a hardware fault
                why, cause = f"{type(error).__name__}: {error}", error
            else:
                if agree(alone_TV, read_TV):
                    return alone_TV
        raise ValueError(
            f"`generate` of {type(self._bare).__name__} cannot extend three tokens by three, with or without a cache: "
            f"{why}. Use another model, or pass a `rollout` that can generate with it."
        ) from cause

    def failure(self, prompts: list[list[int]], alone_TV: Tensor, loop: RaggedDecoding | None = None) -> str | None:
        """Why the last prompt cannot be continued in this way, or `None` if it gets the logits that it gets alone."""
        name = type(self._bare).__name__
        try:
            same = agree(self.logits(prompts, loop), alone_TV)
        except torch.OutOfMemoryError:
            raise
        except (*_FAILS, RuntimeError) as error:  # a RuntimeError about shapes: the prompt alone has just worked
            return f"without rows that have ended, {name} raises {type(error).__name__}: {error}"
        return None if same else f"without rows that have ended, {name} computes other logits"

    def logits(self, prompts: list[list[int]], loop: RaggedDecoding | None = None) -> Tensor:
        """[T, V], the logits for the last prompt in a left-padded batch."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=self._device)
        with self._recorded() as logits:
            returned = generate(
                self.model,
                {"input_ids": ids, "attention_mask": mask},
                self.config(),
                logits_processor=LogitsProcessorList([_ForcedTokens(longest, self.vocabulary)]),
                custom_generate=loop,
            )
        if loop and not isinstance(returned, list):
            raise TypeError("its `generate` ignores `custom_generate`")
        return torch.stack(logits[:_TOKENS])

    @contextmanager
    def _recorded(self) -> Iterator[list[Tensor]]:
        # Not with a logits processor: those of the model's own generation config come first, and may depend on padding.
        logits: list[Tensor] = []
        hook = self._bare.register_forward_hook(
            lambda module, args, output: logits.append(output.logits[-1, -1].to(self._rounded, copy=True))
        )
        try:
            yield logits
        finally:
            hook.remove()

    def config(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=[],
            use_cache=self.cached,
            disable_compile=True,
        )


class _ForcedTokens(LogitsProcessor):
    """Makes every row generate the same tokens."""

    def __init__(self, prompt_tokens: int, vocabulary: int) -> None:
        self._first = vocabulary // 2 - prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._first + input_ids.size(1)] = 0.0
        return forced
