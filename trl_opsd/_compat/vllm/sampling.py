"""Sampling options as vLLM knows them, and tokens that it must not sample."""

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
"""Names of what `vllm.SamplingParams` takes."""


def request_options() -> list[str]:
    """Names of those that a request to a server may have; it ignores others."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # takes seconds

    return [name for name in CompletionRequest.model_fields if name in OPTIONS]


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """Options of `vllm.SamplingParams`, as it wants them.

    Raises:
        ValueError: One is outside of what vLLM takes.
    """
    if isinstance(given.get("structured_outputs"), dict):
        given = {**given, "structured_outputs": StructuredOutputsParams(**given["structured_outputs"])}
    if given.get("stop"):
        given = {**given, "detokenize": True}
    with refusals():
        SamplingParams(**given)
    return given


@contextmanager
def refusals() -> Iterator[None]:
    """Says which library refuses a generation option."""
    try:
        yield
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ValueError(f"vLLM refuses a generation option: {error}") from error


def only_known(vocabulary: int, placeholders: Collection[int] = ()) -> type[Any]:
    """A logits processor after which ids from `vocabulary` on, and `placeholders`, have probability 0; for the whole
    batch at once.

    Both of vLLM's model runners take it: the second gives it other arguments, and wants its own base class.
    """
    never = list(placeholders)

    class OnlyTheFirst(LogitsProcessor):
        def __init__(self, vllm_config: Any, *_: Any) -> None:
            """Needs nothing from the engine."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Is the same for every request."""

        def apply(self, logits: Tensor, *_: Any) -> Tensor:
            logits[:, vocabulary:] = -torch.inf
            logits[:, never] = -torch.inf
            return logits

    return type("OnlyTheFirst", (OnlyTheFirst, _second_base()), {})


def _second_base() -> Any:
    """The base class that the second model runner asks for; `object` where vLLM has none."""
    try:
        return import_module("vllm.v1.worker.gpu.sample.logits_processor").LogitsProcessor
    except ImportError:
        return object
