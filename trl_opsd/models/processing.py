"""The tokenizer of a student, also where it lies inside a processor of more than text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin

from trl_opsd._compat.trl import get_config_model_id


def loaded_processing_class(student: Any, loading: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """The tokenizer, or the processor of more than text, from where the student comes from, as TRL loads it.

    Args:
        student (`str` or [`~transformers.PreTrainedModel`]):
            A path, a model id or a model.
        loading (`Mapping[str, Any]`):
            Options for loading the student.
        trust_remote_code (`bool`):
            Whether it may ship Python code of its own.
    """
    return AutoProcessor.from_pretrained(
        student if isinstance(student, str) else get_config_model_id(student.config),
        revision=loading.get("revision") if isinstance(student, str) else None,
        truncation_side="left",
        padding_side="left",
        trust_remote_code=trust_remote_code,
    )


def text_tokenizer(processing_class: Any) -> Any:
    """The tokenizer of a processor of more than text, with the chat template of the processor if it has none.

    Args:
        processing_class (`Any`):
            A [`~transformers.ProcessorMixin`]; anything else is returned as it is.
    """
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer = getattr(processing_class, "tokenizer", None)
    if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.chat_template is None:
        tokenizer.chat_template = getattr(processing_class, "chat_template", None)
    return tokenizer


def check_processing_class(processing_class: Any) -> None:
    """Refuses what cannot tokenize text for a student.

    Raises:
        TypeError: It is nothing that tokenizes, or a processor without a tokenizer.
        ValueError: It has no end-of-sequence token.
    """
    processing_class, given = text_tokenizer(processing_class), processing_class
    name = type(given).__name__
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise TypeError(f"`processing_class` is a {name}: expected a tokenizer, or a processor that has one.")
    if processing_class.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no end-of-sequence token, so no completion could end: set `tokenizer.eos_token`."
        )
