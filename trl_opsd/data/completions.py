"""Completions of a dataset, as a column or in conversations, and what a teacher may read of others of its prompt."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trl_opsd.data.prompts import check_prompt, tells_more
from trl_opsd.data.survey import has_transform
from trl_opsd.data.tokenization import check_parts
from trl_opsd.types.rollout import cut_after_end

logger = get_logger(__name__)

_THEIRS, _OURS = "solution", "privileged_context"


def named_as_here(template: Any) -> Any:
    """A `teacher_prompt_template` with the placeholder `{solution}` under its name here; anything else unchanged."""
    return template.replace(f"{{{_THEIRS}}}", f"{{{_OURS}}}") if isinstance(template, str) else template


def solutions_as_context(datasets: Any) -> Any:
    """Renames the column `solution` where no other column gives a teacher another prompt."""
    if isinstance(datasets, dict):
        return type(datasets)({name: solutions_as_context(dataset) for name, dataset in datasets.items()})
    columns = (datasets.column_names or ()) if isinstance(datasets, Dataset | IterableDataset) else ()
    if _THEIRS in columns and not tells_more(columns):
        logger.warning_once(f"The column '{_THEIRS}' is used as '{_OURS}'.")
        return datasets.rename_column(_THEIRS, _OURS)
    return datasets


_COLUMN = "messages"


def with_prompts(datasets: Any, where: str, by_default: Any = None) -> Any:
    """Replaces `messages` by `prompt` and `completion` in datasets without prompts; other objects stay as they are.

    `by_default` is the prompt of rows that have neither.
    """
    if isinstance(datasets, dict):
        named = {name: with_prompts(dataset, f"{where}[{name!r}]", by_default) for name, dataset in datasets.items()}
        return type(datasets)(named)
    if not _has_conversations(datasets):
        if by_default is None or not isinstance(datasets, Dataset | IterableDataset):
            return datasets
        if "prompt" in (datasets.column_names or ()):
            return datasets
        return datasets.map(lambda row: {"prompt": row.get("prompt", by_default)})
    if "completion" in (datasets.column_names or ()):
        raise ValueError(
            f"{where} has columns {_COLUMN!r} and 'completion', but no 'prompt': the last message of a conversation is "
            "already its completion, so remove one of the two columns, or add the prompts."
        )
    given = {"with_indices": True, "remove_columns": [_COLUMN], "fn_kwargs": {"where": where}}
    if isinstance(datasets, IterableDataset):
        return datasets.map(_split_row, **given)
    with PartialState().local_main_process_first():  # the other processes find it in the cache
        return datasets.with_format(None).map(_split_row, desc=f"Splitting the conversations of {where}", **given)


def _has_conversations(dataset: Any) -> bool:
    if not isinstance(dataset, Dataset | IterableDataset):
        return False
    if isinstance(dataset, Dataset) and has_transform(dataset):  # the transform may create prompts
        return False
    columns = dataset.column_names or ()
    kind = str((dataset.features or {}).get(_COLUMN, "'role'"))  # a stream may not know its features
    return _COLUMN in columns and "prompt" not in columns and "'role'" in kind


def _split_row(row: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    """The prompt and the completion of a conversation, which must end with an answer of the assistant."""
    messages, name = row[_COLUMN], f"The conversation in row {number} of {where}"
    check_prompt(messages, name)
    if (role := messages[-1]["role"]) != "assistant":
        raise ValueError(
            f"{name} ends with a message of the {role}, but in a column {_COLUMN!r} the last message must be the "
            "assistant's answer: remove what follows it, or rename the column to 'prompt' if the student should answer."
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}


COMPLETION = "completion"
"""The column, named as in TRL's datasets of prompts and completions."""
TOKENS = "completion_ids"
"""The column with a completion's token ids, as they were generated; it takes precedence over its text."""


def check_completion(row: Mapping[str, Any], where: str) -> None:
    """Refuses a row without a completion of the kind of its prompt: text, or one message of the assistant."""
    if COMPLETION not in row:
        raise ValueError(f"{where} has no column 'completion', which `lmbda` below 1 needs: add it, or set `lmbda=1`.")
    name = f"The completion in {where}"
    kind, of_prompt = check_prompt(row[COMPLETION], name), "text" if isinstance(row["prompt"], str) else "messages"
    if kind != of_prompt:
        raise ValueError(f"{name} is {kind}, but the prompt is {of_prompt}: expected the same kind for both.")
    if kind == "messages" and [one["role"] for one in row[COMPLETION]] != ["assistant"]:
        raise ValueError(f"{name}: expected a single message of the assistant, as the student would generate.")


def completion_ids(
    row: Mapping[str, Any],
    where: str,
    prompt_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    ends: Collection[int],
    most: int,
    see: Callable[[list[Any]], list[int]] | None = None,
) -> list[int]:
    """The tokens of a row's completion after its prompt, up to the first end token and at most `most`.

    With images in the prompt, `see` gives the token ids of the prompt and a completion together.
    """
    check_completion(row, where)
    prompt, completion = row["prompt"], row[COMPLETION]
    if (given := row.get(TOKENS)) is not None:
        text = completion if isinstance(completion, str) else completion[0]["content"]
        if (theirs := tokenizer.decode(given, skip_special_tokens=True)) != text:
            raise ValueError(
                f"{where}: the tokens in {TOKENS!r} are {theirs[:40]!r} to this tokenizer, but 'completion' is "
                f"{text[:40]!r}: remove the column {TOKENS!r}, or generate the completions again."
            )
        return list(given)[:most]
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
            if see is None:
                whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **template)[
                    "input_ids"
                ]
            else:
                whole = see(completion)
        except (TemplateError, TypeError) as error:  # a TypeError where content parts are joined as text
            raise ValueError(
                f"{where}: the tokenizer's chat template rejects the prompt with its completion: {error}."
            ) from error
        # Off-policy rows are trained after the same prompt tokens as rollouts, so the template must not change them.
        if whole[: len(prompt_ids)] != prompt_ids:
            raise ValueError(
                f"{where}: rendered with its completion, the conversation does not start with the student's prompt, "
                f"which ends with {tokenizer.decode(prompt_ids[-8:])!r}: give both as text, or set "
                "`chat_template_kwargs` so that the chat template renders the prompt the same way in both."
            )
        ids = whole[len(prompt_ids) :]
        check_parts(completion, tokenizer.decode(ids), f"The completion in {where}")
        _warn_of_loss(completion[0]["content"], tokenizer.apply_chat_template(messages, tokenize=False, **template))
    return cut_after_end(ids, ends)[:most]


def _warn_of_loss(answer: Any, text: str) -> None:
    """Warns once that a template changes answers; some templates strip reasoning."""
    if isinstance(answer, str) and answer.strip() not in text:
        logger.warning_once(
            "The tokenizer's chat template changes or drops parts of the dataset's answers, as some templates do with "
            "the text before '</think>': the student learns the rendered answer. If this is not intended, give prompts "
            "and completions as text."
        )


# ---- What a teacher may read of other completions of its prompt ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a completion once the rewards of its group are: of all completions of its prompt."""

    reward: float | None
    """The sum of its rewards times `reward_weights`; `None` if no function gave one."""
    number: int
    """Its place in the group."""
    group: tuple[tuple[str, float | None], ...]
    """Text and reward of each completion of the group, this one too, in the order of generation."""

    def success(self, threshold: float) -> str | None:
        """The first other completion with a reward of at least `threshold`, without what it thought."""
        others = (
            without_thoughts(text).strip()
            for place, (text, reward) in enumerate(self.group)
            if place != self.number and reward is not None and reward >= threshold
        )
        return next(filter(None, others), None)


_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>", "<channel|>"),
)
"""What begins and ends a thought: in most families, Magistral, Seed-OSS, Command A Reasoning, gpt-oss, Gemma 4."""


def without_thoughts(text: str) -> str:
    """A completion without what it thought; templates may begin a thought in the prompt, and some never end."""
    for begin, end in _THOUGHTS:
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", text, flags=re.DOTALL)
        text = text.rpartition(end)[2].partition(begin)[0]
    return text


def texts_of(tokenizer: Any, completions: Sequence[list[int]]) -> list[str]:
    """Completions without special tokens, but for those that begin or end a thought."""
    added = (one.content for one in tokenizer.added_tokens_decoder.values() if one.special)
    special = {*tokenizer.all_special_tokens, *added}
    kept = {one for one in special if any(one in mark for pair in _THOUGHTS for mark in pair)}
    texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=not kept)
    return [re.sub("|".join(map(re.escape, special - kept)), "", text) for text in texts] if kept else texts


def reads_outcome(function: Any) -> bool:
    """Whether a `teacher_prompt_fn` takes an [`Outcome`] too."""
    try:
        inspect.signature(function).bind({}, "", None)
    except (TypeError, ValueError):
        return False
    return True
