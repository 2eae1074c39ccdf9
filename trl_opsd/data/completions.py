"""Turns the column `completion` of a dataset into the tokens that the student would have generated after a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from accelerate.logging import get_logger
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trl_opsd.data.chat_templates import check_parts
from trl_opsd.data.prompts import check_prompt

__all__ = ["COMPLETION", "check_completion", "completion_ids", "cut_after_end"]

logger = get_logger(__name__)

COMPLETION = "completion"
"""The column, named as in TRL's datasets of prompts and completions."""


def check_completion(row: Mapping[str, Any], where: str) -> None:
    """Refuses a row without a completion of the kind of its prompt: text, or one message of the assistant."""
    if COMPLETION not in row:
        raise ValueError(
            f"{where} has no column 'completion', which `lmbda` below 1 learns from: add one, or set `lmbda=1`."
        )
    name = f"The completion in {where}"
    kind, of_prompt = check_prompt(row[COMPLETION], name), "text" if isinstance(row["prompt"], str) else "messages"
    if kind != of_prompt:
        raise ValueError(f"{name} is {kind}, but the prompt is {of_prompt}: both have to be of one kind.")
    if kind == "messages" and [one["role"] for one in row[COMPLETION]] != ["assistant"]:
        raise ValueError(f"{name} is not one message of the assistant, which is what the student would write.")


def completion_ids(
    row: Mapping[str, Any],
    where: str,
    prompt_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    ends: Collection[int],
    most: int,
) -> list[int]:
    """The tokens of a row's completion after its prompt, up to the first end token and at most `most`."""
    check_completion(row, where)
    prompt, completion = row["prompt"], row[COMPLETION]
    if isinstance(prompt, str):
        # Tokenized together, as the student would have generated them: alone, a completion may have other tokens.
        whole = tokenizer(prompt + completion)["input_ids"]
        joined = whole[: len(prompt_ids)] == prompt_ids  # otherwise a token spans the border
        ids = whole[len(prompt_ids) :] if joined else tokenizer(completion, add_special_tokens=False)["input_ids"]
        # Text may lack an end token: the tokenizer's is appended if it ends completions, else the first that does.
        own = tokenizer.eos_token_id
        ids = [*ids, *([own] if own in ends else list(ends)[:1])]
    else:
        messages = [*prompt, *completion]
        try:
            whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **template)
        except (TemplateError, TypeError) as error:  # a TypeError where content parts are joined as text
            raise ValueError(
                f"{where}: the chat template of the tokenizer refuses it with its completion: {error}."
            ) from error
        # Off-policy rows are trained after the same prompt tokens as rollouts, so the template must not change them.
        if whole["input_ids"][: len(prompt_ids)] != prompt_ids:
            raise ValueError(
                f"{where}: with its completion the chat template does not begin with what the student reads before it, "
                f"{tokenizer.decode(prompt_ids[-8:])!r} at its end: write both as text, or set `chat_template_kwargs` "
                "so that the template writes prompts alike."
            )
        ids = whole["input_ids"][len(prompt_ids) :]
        check_parts(completion, tokenizer.decode(ids), f"The completion in {where}")
        _warn_of_loss(completion[0]["content"], tokenizer.apply_chat_template(messages, tokenize=False, **template))
    return cut_after_end(ids, ends)[:most]


def _warn_of_loss(answer: Any, text: str) -> None:
    """Warns once that a template changes answers; some templates strip reasoning."""
    if isinstance(answer, str) and answer.strip() not in text:
        logger.warning_once(
            "The chat template of the tokenizer changes answers of the dataset, or leaves a part of them out, as some "
            "do with what stands before '</think>': the student learns what the template writes. Write prompts and "
            "completions as text if that is not meant."
        )


def cut_after_end(completion_ids: list[int], end_ids: Collection[int]) -> list[int]:
    """Truncates a completion after its first end-of-sequence token, whichever of `end_ids` that is."""
    for position, token in enumerate(completion_ids):
        if token in end_ids:
            return completion_ids[: position + 1]
    return completion_ids
