"""Special tokens outside the model's vocabulary: a padding token is replaced, an end token is refused.

After `add_tokens` or `add_special_tokens` a tokenizer has such tokens until the model is resized too.
"""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from trl_opsd.models.model_checks import LOCATION_OPTIONS

logger = get_logger(__name__)

_HOW_TO_GROW = "after `tokenizer.add_tokens` the model grows by `model.resize_token_embeddings(len(tokenizer))`"


def configured_vocabulary(model: Any, loading: dict[str, Any]) -> int | None:
    """The vocabulary size in a model's config, or `None` where it has none; loads no weights."""
    if not isinstance(model, str):
        rows: int | None = getattr(model.config.get_text_config(), "vocab_size", None)
        return rows
    place = {name: loading[name] for name in LOCATION_OPTIONS if loading.get(name) is not None}
    config, _ = PretrainedConfig.get_config_dict(model, **place)
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return rows


def ensure_special_tokens(tokenizer: PreTrainedTokenizerBase | None, rows: int | None) -> None:
    """Refuses an end token that cannot be generated, and replaces a padding token outside the vocabulary."""
    if tokenizer is None or rows is None:  # not loaded yet, or unknown
        return
    if not _known(tokenizer.eos_token_id, rows):
        raise ValueError(
            f"The end token {tokenizer.eos_token!r} has the id {tokenizer.eos_token_id}, but the student knows {rows} "
            f"ids, so no completion could end with it: use the tokenizer the student was trained with; {_HOW_TO_GROW}."
        )
    if tokenizer.pad_token is not None and not _known(tokenizer.pad_token_id, rows):
        logger.warning(
            f"The padding token {tokenizer.pad_token!r} has the id {tokenizer.pad_token_id}, but the student knows "
            f"{rows} ids, so {tokenizer.eos_token!r} is used for padding instead, which does not change any result. To "
            f"keep the padding token: {_HOW_TO_GROW}."
        )
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


def _known(token: Any, rows: int) -> bool:
    return isinstance(token, int) and 0 <= token < rows
