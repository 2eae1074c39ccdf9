"""vLLM's sampling options, and a mask for tokens that it must not sample."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import LogitsProcessor

OPTIONS: tuple[str, ...] = tuple(inspect.signature(SamplingParams).parameters)
"""Names of the arguments of `vllm.SamplingParams`."""


def request_options() -> list[str]:
    """Names of the sampling options that a request to a server may contain; the server ignores others."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # takes seconds to import

    return [name for name in CompletionRequest.model_fields if name in OPTIONS]


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """Checks options for `vllm.SamplingParams`, and converts them to the types it expects."""
    if isinstance(given.get("structured_outputs"), dict):
        given = {**given, "structured_outputs": StructuredOutputsParams(**given["structured_outputs"])}
    if given.get("stop"):
        # Stop strings are matched against text.
        given = {**given, "detokenize": True}
    with refusals():
        SamplingParams(**given)
    return given


@contextmanager
def refusals() -> Iterator[None]:
    """Adds to an error about a generation option that vLLM raised it."""
    try:
        yield
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ValueError(f"vLLM refuses a generation option: {error}") from error


def vocabulary_mask(vocabulary: int, placeholders: Collection[int] = ()) -> type[Any]:
    """A logits processor that gives ids from `vocabulary` on, and `placeholders`, probability 0, for a whole batch."""
    never = torch.tensor([*placeholders], dtype=torch.long)

    class VocabularyMask(LogitsProcessor):
        def __init__(self, vllm_config: Any, *_: Any) -> None:
            """Needs nothing from the engine."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Does nothing: the mask is the same for every request."""

        def apply(self, logits: Tensor, *_: Any) -> Tensor:
            nonlocal never
            never = never.to(logits.device)  # once: a copy waits for the device
            logits[:, vocabulary:].fill_(-torch.inf)
            return logits.index_fill_(1, never, -torch.inf)

    # Accepted by both of vLLM's model runners: the second passes other arguments and requires its own base class.
    return type("VocabularyMask", (VocabularyMask, _second_base()), {})


def _second_base() -> Any:
    """The base class that the second model runner requires; `object` if vLLM does not have it."""
    try:
        return import_module("vllm.v1.worker.gpu.sample.logits_processor").LogitsProcessor
    except ImportError:
        return object
