"""Tokenizers and processors as a user passes them, and special tokens within the student's embedding.

After `add_tokens` or `add_special_tokens` a tokenizer has such tokens until the model is resized too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from accelerate.logging import get_logger
from transformers import AutoProcessor, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from trl_opsd._compat.trl import get_config_model_id
from trl_opsd.models.checks import adapter_at, file_at, place_of

logger = get_logger(__name__)


def loaded_processing_class(student: Any, loading: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """Loads the tokenizer or multimodal processor from the student's checkpoint, as TRL does."""
    path = student if isinstance(student, str) else get_config_model_id(student.config)
    options = {
        "revision": loading.get("revision") if isinstance(student, str) else None,
        "truncation_side": "left",
        "padding_side": "left",
        "trust_remote_code": trust_remote_code,
    }
    try:
        return AutoProcessor.from_pretrained(path, **options)
    except (ImportError, OSError) as error:  # of an image processor, which text does not need
        if not has_tokenizer(path, {"revision": options["revision"]}):
            raise
        logger.warning(
            f"The processor of {path} cannot be loaded ({str(error).strip().splitlines()[0]}), so only its tokenizer "
            "is used, and saved with the model. If packages are missing, these are often pillow and torchvision."
        )
        return AutoTokenizer.from_pretrained(path, **options)


def has_tokenizer(path: str, place: Mapping[str, Any]) -> bool:
    """Whether a path or model id has tokenizer files, without which `AutoTokenizer` builds an empty tokenizer."""
    return any(file_at(path, name, place) for name in ("tokenizer_config.json", "tokenizer.json"))


def tokenizer_at(path: str, loading: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Where a model's tokenizer is, and how it is found there: beside its weights, or those of its adapter's base."""
    if has_tokenizer(path, place_of(loading)) or (adapter := adapter_at(path, loading)) is None:
        return path, loading
    return adapter.base, adapter.loading_of_base


def text_tokenizer(processing_class: Any) -> Any:
    """A processor's tokenizer, with the processor's chat template if it has none; anything else as it is."""
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer = getattr(processing_class, "tokenizer", None)
    if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.chat_template is None:
        # Some checkpoints keep the template with the processor only.
        tokenizer.chat_template = getattr(processing_class, "chat_template", None)
    return tokenizer


def check_processing_class(processing_class: Any) -> None:
    """Refuses an empty tokenizer, as one is that was loaded from a folder without its files, or one without an end."""
    tokenizer = text_tokenizer(processing_class)
    if tokenizer.eos_token_id is None or len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise ValueError(
            f"The tokenizer ({tokenizer.name_or_path}) has no end-of-sequence token, so no completion could end, or "
            "only special tokens: save the model's tokenizer in its folder, or pass it as `processing_class`."
        )


_HOW_TO_GROW = "after `tokenizer.add_tokens`, resize the model with `model.resize_token_embeddings(len(tokenizer))`"


def ensure_special_tokens(tokenizer: PreTrainedTokenizerBase | None, rows: int | None) -> None:
    """Refuses an end token that cannot be generated, and replaces a padding token outside the vocabulary."""
    if tokenizer is None or rows is None:  # not loaded yet, or unknown
        return
    if not _known(tokenizer.eos_token_id, rows):
        raise ValueError(
            f"The end token {tokenizer.eos_token!r} has the id {tokenizer.eos_token_id}, but the student has {rows} "
            f"ids, so no completion could end with it: use the tokenizer the student was trained with; {_HOW_TO_GROW}."
        )
    if tokenizer.pad_token is not None and not _known(tokenizer.pad_token_id, rows):
        # Padding is identified by its mask, never by its id, so any token of the vocabulary will do.
        tokenizer.pad_token = tokenizer.eos_token


def known_end_tokens(end_ids: list[int], rows: int) -> list[int]:
    """The end tokens in the student's vocabulary; a checkpoint may name others, which are never generated."""
    return [token for token in end_ids if _known(token, rows)]


def placeholders(config: PretrainedConfig, rows: int) -> list[int]:
    """The placeholder tokens of images, videos and audio, which must not occur in a text."""
    # Configs name these tokens in two ways.
    names = (f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
    stated: set[Any] = {getattr(config, name, None) for name in names}
    return sorted(token for token in stated if _known(token, rows))


def readable(ids: list[int], tokenizer: PreTrainedTokenizerBase, placeholders: Collection[int]) -> str:
    """The text of a prompt, with one mark for each run of placeholder tokens: an image may have hundreds."""
    text = tokenizer.decode(ids)
    marks = "|".join(re.escape(tokenizer.decode([one])) for one in set(placeholders).intersection(ids))
    fold = rf"({marks})(?: ?\1)*"
    return re.sub(fold, lambda run: f"⟨image, {run[0].count(run[1])} tokens⟩", text) if marks else text


def _known(token: Any, rows: int) -> bool:
    return isinstance(token, int) and 0 <= token < rows
