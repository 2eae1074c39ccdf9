"""Examines what a tokenizer adds to text, and which arguments its chat template reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from inspect import signature

from accelerate.logging import get_logger
from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_TAKEN = {
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
}
"""Arguments of `apply_chat_template` that TRL passes, or that contradict one of those."""


def added_at_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token that a tokenizer writes after each text, if there is one, as those of T5 and BERT do."""
    (bare,), (whole,) = tokenizer(["a"], add_special_tokens=False)["input_ids"], tokenizer(["a"])["input_ids"]
    if whole == bare or whole[-len(bare) :] == bare:
        return None
    return str(tokenizer.convert_ids_to_tokens(whole[-1]))


def check_template_arguments(tokenizer: PreTrainedTokenizerBase, option: str, names: Collection[str]) -> str | None:
    """What is wrong with chat template arguments, in words; `None` if the template reads all of them.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its template is searched for the names.
        option (`str`):
            The option that holds them.
        names (`Collection[str]`):
            The arguments.

    Raises:
        ValueError: The trainer sets one of them.
    """
    if taken := sorted(_TAKEN & set(names)):
        raise ValueError(f"`{option}` sets {taken[0]!r}, which the trainer sets itself: remove it.")
    template = str(tokenizer.chat_template or "")  # a dict of several is searched as a whole
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    unread = [name for name in names if name not in words | signature(tokenizer.apply_chat_template).parameters.keys()]
    if not template or not unread:
        return None
    near = get_close_matches(unread[0], words, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]!r}?" if near else "remove it, or use a template that reads it."
    return f"`{option}` sets {unread[0]!r}, which the chat template of the tokenizer never reads: {hint}"


def warn_of_bare_text(tokenizer: PreTrainedTokenizerBase, where: str, prompts: Iterable[str]) -> None:
    """Warns when a chat model gets prompts that are text without any of its special tokens.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The student's.
        where (`str`):
            The dataset, for the message.
        prompts (`Iterable[str]`):
            Some of its prompts.
    """
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not tokenizer.chat_template or any(token in prompt for prompt in prompts for token in special):
        return
    logger.warning(
        f"The prompts of {where} are text, which is read as it is: no chat template is applied, although the tokenizer "
        "has one. If the student is a chat model, give messages: [{'role': 'user', 'content': '...'}]."
    )
