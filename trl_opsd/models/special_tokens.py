"""Special tokens that a model has no row for: padding takes another one, an end that could not be written is refused.

A tokenizer that was grown with `add_tokens` or `add_special_tokens` has such tokens until the model is resized too.
"""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from trl_opsd.models.given import PLACE

logger = get_logger(__name__)

_HOW_TO_GROW = "after `tokenizer.add_tokens` the model grows by `model.resize_token_embeddings(len(tokenizer))`"


def rows_said(model: Any, loading: dict[str, Any]) -> int | None:
    """How many token ids a model knows, by its config, which is all that is read.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A path, a model id or a model.
        loading (`dict`):
            Options for loading it.
    """
    if not isinstance(model, str):
        rows: int | None = getattr(model.config.get_text_config(), "vocab_size", None)
        return rows
    place = {name: loading[name] for name in PLACE if loading.get(name) is not None}
    config, _ = PretrainedConfig.get_config_dict(model, **place)
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return rows


def settle_special_tokens(tokenizer: PreTrainedTokenizerBase | None, rows: int | None) -> None:
    """Sees to it that padding can be read and the end token can be written.

    Padding is masked everywhere and told from tokens by its mask, so any token that the models know will do: it is the
    end token then, as for a tokenizer without a padding token.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The student's; its padding token may be exchanged. `None` means that it is not loaded yet.
        rows (`int`, *optional*):
            Token ids from here on are not known to the model. `None` where that is not known itself.

    Raises:
        ValueError: The end token is not known to the model.
    """
    if tokenizer is None or rows is None:
        return
    if not _known(tokenizer.eos_token_id, rows):
        raise ValueError(
            f"The end token {tokenizer.eos_token!r} has the id {tokenizer.eos_token_id}, but the student knows {rows} "
            f"ids, so no completion could end with it: use the tokenizer the student was trained with; {_HOW_TO_GROW}."
        )
    if tokenizer.pad_token is not None and not _known(tokenizer.pad_token_id, rows):
        logger.warning(
            f"The padding token {tokenizer.pad_token!r} has the id {tokenizer.pad_token_id}, but the student knows "
            f"{rows} ids, so {tokenizer.eos_token!r} pads instead; no number depends on it. To keep it: {_HOW_TO_GROW}."
        )
        tokenizer.pad_token = tokenizer.eos_token


def writable(end_ids: list[int], rows: int) -> list[int]:
    """The end tokens that the student can write; a checkpoint may name others, with which nothing ever ends."""
    return [token for token in end_ids if _known(token, rows)]


def placeholders(config: PretrainedConfig, rows: int) -> list[int]:
    """The tokens that stand for an image, a video or a sound, which a text must not hold.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Of a model that may read more than text.
        rows (`int`):
            Token ids from here on are not known to the model.
    """
    names = (f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
    stated: set[Any] = {getattr(config, name, None) for name in names}
    return sorted(token for token in stated if _known(token, rows))


def _known(token: Any, rows: int) -> bool:
    return isinstance(token, int) and 0 <= token < rows
