"""Bounds the number of tokens of a text by its bytes, for tokenizers where that can be proved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import models
from transformers import PreTrainedTokenizerBase

_SPACE = "▁"
"""SentencePiece's symbol for a space."""


def at_most_one_token_per_byte(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text that is not blank has at least one token, and at most one for each UTF-8 byte after NFC."""
    # True of BPE over bytes or characters (Qwen, Llama, Gemma, Mistral, GPT) unless text is rewritten first. Each of
    # these may add one token to a whole text.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model) is not models.BPE:
        return False
    try:
        normalizers, splitters = [*_steps(backend.normalizer)], [*_steps(backend.pre_tokenizer)]
    except Exception:  # steps in Python have no state; the library raises a bare `Exception`
        return False
    short_space = backend.token_to_id(_SPACE) is not None
    rewrites = any(not _is_harmless(step, short_space) for step in normalizers)
    # Without a fallback, characters outside the vocabulary vanish, and a text may have no token at all.
    knows_all = backend.model.byte_fallback or backend.model.unk_token is not None
    by_bytes = any(step["type"] == "ByteLevel" for step in splitters)
    # SentencePiece writes a space as a character of three bytes: unless that is one token, a space may become three.
    spaces_grow = any(step["type"] == "Metaspace" for step in splitters) and not short_space
    return (by_bytes or knows_all) and not rewrites and not spaces_grow


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, or of each in a sequence of them."""
    if part is not None:
        state = json.loads(part.__getstate__())
        yield from _flat(state)


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for step in state.get("normalizers") or state.get("pretokenizers") or ():
            yield from _flat(step)
    else:
        yield state


def _is_harmless(step: dict[str, Any], short_space: bool) -> bool:
    if step["type"] == "Replace":
        return step["pattern"] == {"String": " "} and step["content"] == _SPACE and short_space
    return step["type"] == "NFC" or (step["type"] == "Prepend" and step["prepend"] == _SPACE)
