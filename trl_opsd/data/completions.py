"""Completions of a dataset, as a column or in conversations: their tokens, and who wrote each."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from accelerate import PartialState
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trl_opsd.data.images import in_parts
from trl_opsd.data.prompts import PREFIX, PRIVILEGED, check_prompt, tells_more, tidy
from trl_opsd.data.survey import has_transform
from trl_opsd.data.tokenization import check_parts
from trl_opsd.types.rollout import Author, Given, cut_after_end

logger = get_logger(__name__)

_THEIRS = {"privileged_context": "solution", "teacher": "teacher_id"}
"""TRL's names of columns by ours."""


def named_as_here(template: Any) -> Any:
    """A `teacher_prompt_template` with the placeholder `{solution}` under its name here; anything else unchanged."""
    return template.replace("{solution}", "{privileged_context}") if isinstance(template, str) else template


def renamed(datasets: Any, ours: str) -> Any:
    """Gives a column of TRL its name here, unless another column has the same part."""
    if isinstance(datasets, dict):
        return type(datasets)({name: renamed(dataset, ours) for name, dataset in datasets.items()})
    theirs = _THEIRS[ours]
    columns = (datasets.column_names or ()) if isinstance(datasets, Dataset | IterableDataset) else ()
    if theirs in columns and not (tells_more(columns) if ours in PRIVILEGED else ours in columns):
        logger.warning_once(f"The column '{theirs}' is used as '{ours}'.")
        return datasets.rename_column(theirs, ours)
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
    return _COLUMN in columns and "prompt" not in columns and ("'role'" in kind or "Json" in kind)


def _split_row(row: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    """The prompt of a conversation, up to what the user says last, and its completion: what follows."""
    messages, name = row[_COLUMN], f"The conversation in row {number} of {where}"
    check_prompt(messages, name)
    if (role := messages[-1]["role"]) != "assistant":
        raise ValueError(
            f"{name} ends with a message of the {role}, but in a column {_COLUMN!r} the last message must be the "
            "assistant's answer: remove what follows it, or rename the column to 'prompt' if the student should answer."
        )
    start = _end_of_prompt(messages)
    return {"prompt": messages[:start], "completion": messages[start:]}


def _end_of_prompt(messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the answers and calls begin with which a conversation ends."""
    places = range(len(messages), 0, -1)
    return next((place for place in places if messages[place - 1]["role"] not in ("assistant", "tool")), 0)


def before_turn(
    row: Mapping[str, Any], number: int, turn: int | None = None, seed: int = 0, is_scored: bool = False
) -> dict[str, Any]:
    """The prompt before a turn of the assistant in a recorded episode: what the student goes on with, alone.

    Nothing is called again, so no environment is needed (ReOPD, arXiv 2607.04763). For a dataset:
    `episodes.map(before_turn, with_indices=True, remove_columns=["messages"])`.

    Args:
        row (`Mapping[str, Any]`):
            With the episode in the column `messages`.
        number (`int`):
            Of the row.
        turn (`int`, *optional*):
            The turn among those of the assistant after what the user says last, from 0. When `None`, it is drawn.
        seed (`int`, *optional*, defaults to 0):
            Of the draw, with the number of the row.
        is_scored (`bool`, *optional*, defaults to `False`):
            Whether the turns before it are the beginning of the completion, `completion_prefix`, and so in the loss.
    """
    messages = row[_COLUMN]
    start = _end_of_prompt(messages)
    turns = [place for place in range(start, len(messages)) if messages[place]["role"] == "assistant"]
    cut = Random(f"{seed} {number}").choice(turns) if turn is None else turns[turn]
    if is_scored:
        return {"prompt": messages[:start], PREFIX: messages[start:cut] or None}
    return {"prompt": messages[:cut]}


COMPLETION = "completion"
"""The column, named as in TRL's datasets of prompts and completions."""
TOKENS = "completion_ids"
"""The column with a completion's token ids, as they were generated; it takes precedence over its text."""
_WITHIN = 3
"""Characters of a special token with which a text ends that was cut in the middle of it: fewer may be anything."""


def check_completion(row: Mapping[str, Any], where: str, column: str = COMPLETION) -> None:
    """Refuses a row without a completion, or with one that does not go with its prompt."""
    if column not in row:
        raise ValueError(f"{where} has no column 'completion', which `lmbda` below 1 needs: add it, or set `lmbda=1`.")
    name, is_beginning = f"The {column} in {where}", column == PREFIX
    given, prompt = row[column], row["prompt"]
    kind, of_prompt = check_prompt(given, name), "text" if isinstance(prompt, str) else "messages"
    wrong = ""
    if kind != of_prompt and not (is_beginning and kind == "text"):
        wrong = f"is {kind}, but the prompt is {of_prompt}: expected the same kind for both"
    elif kind == "messages":
        last = ("assistant", "tool") if is_beginning else ("assistant",)
        roles, calls = [one["role"] for one in given], given[-1].get("tool_calls")
        if roles[0] != "assistant" or roles[-1] not in last or not {*roles} <= {"assistant", "tool"}:
            wrong = f"has the roles {roles}: expected 'assistant' and 'tool', first assistant, last {' or '.join(last)}"
        elif is_beginning and roles[-1] == "assistant" and (calls or not given[-1]["content"]):
            wrong = f"ends with {'calls without answers' if calls else 'an empty message'}: remove that, or give `None`"
    if wrong:
        raise ValueError(f"{name} {wrong}.")
    if kind == "messages":
        tidy([*prompt, *given], f"{where}, with its {column}")


def check_open(text: str, tokenizer: PreTrainedTokenizerBase, where: str, ends: Collection[int]) -> None:
    """Refuses the beginning of a completion that ends it, or ends in the middle of a special token."""
    special = map(str, tokenizer.added_tokens_decoder.values())
    parts = ((token[:length], token) for token in special for length in range(_WITHIN, len(token)))
    wrong = next(
        (f"ends with {part!r}, in the middle of {token!r}" for part, token in parts if text.endswith(part)), ""
    )
    if not {*tokenizer(text, add_special_tokens=False)["input_ids"]}.isdisjoint(ends):
        wrong = "contains the end of a completion, so that nothing could follow it"
    if wrong:
        raise ValueError(f"{where} {wrong}: remove that, or give `None`.")


def recorded(
    row: Mapping[str, Any],
    where: str,
    column: str,
    prompt: Any,
    prompt_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    ends: Collection[int],
    see: Callable[..., list[int]] | None = None,
) -> Given:
    """The tokens of a row's completion after its prompt, or of its beginning, and who wrote each.

    The prompt is text, or tidy messages with their images; with these, `see` gives the token ids of messages, with
    arguments of the template.
    """
    check_completion(row, where, column)
    given, is_beginning = row[column], column == PREFIX
    name = f"The {column} in {where}"
    if not is_beginning and (known := row.get(TOKENS)) is not None:
        text = given if isinstance(given, str) else given[0]["content"]
        if (theirs := tokenizer.decode(known, skip_special_tokens=True)) != text:
            raise ValueError(
                f"{where}: the tokens in {TOKENS!r} decode to {theirs[:40]!r} with this tokenizer, but 'completion' is "
                f"{text[:40]!r}: remove the column {TOKENS!r}, or generate the completions again."
            )
        return _by_dataset(list(known))
    messages = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
    is_open = is_beginning and messages[-1]["role"] == "assistant"
    if is_open and isinstance(messages[-1]["content"], str):
        check_open(messages[-1]["content"], tokenizer, name, ends)
    if isinstance(prompt, str):
        # Tokenized together, as the student would have generated them: alone, a completion may have other tokens.
        whole = tokenizer(prompt + given)["input_ids"]
        joined = whole[: len(prompt_ids)] == prompt_ids  # otherwise a token spans the border
        ids = whole[len(prompt_ids) :] if joined else tokenizer(given, add_special_tokens=False)["input_ids"]
        if is_beginning:
            return _by_dataset(ids)
        # Text may lack an end token: the tokenizer's is appended if it ends completions, else the first that does.
        own = tokenizer.eos_token_id
        return _by_dataset(cut_after_end([*ids, *([own] if own in ends else list(ends)[:1])], ends))
    messages = tidy([*prompt, *messages], where)[len(prompt) :]
    start, all_messages = _joined(prompt, messages)
    render = _Rendering(tokenizer, template, see, where)
    last = {"continue_final_message": True} if is_open else {"add_generation_prompt": is_beginning}
    whole = render(all_messages, **last)
    # Rows are trained after the same prompt tokens as rollouts, so the template must not change them.
    if whole[: len(prompt_ids)] != prompt_ids:
        raise ValueError(
            f"{where}: rendered with its {column}, the conversation does not start with the student's prompt, "
            f"which ends with {tokenizer.decode(prompt_ids[-8:])!r}: give both as text, or set "
            "`chat_template_kwargs` so that the chat template renders the prompt the same way in both."
        )
    ids = whole[len(prompt_ids) :]
    check_parts(messages, tokenizer.decode(ids), name)
    if not is_beginning:
        text = tokenizer.apply_chat_template(all_messages, tokenize=False, **template)
        _warn_of_loss(messages, text)
    if len(messages) == 1:
        ids = ids if is_open else cut_after_end(ids, ends)
        return replace(_by_dataset(ids), messages=messages, is_open=is_open)
    authors = render.authors(all_messages, start, whole, ends, **last)[len(prompt_ids) :]
    if not is_beginning:  # what follows the last turn is not generated either
        end = max((place for place, one in enumerate(authors) if one), default=-1) + 1
        ids, authors = ids[:end], authors[:end]
    return Given(ids, authors, messages, is_open)


def _joined(prompt: Sequence[Any], given: list[Any]) -> tuple[int, list[Any]]:
    """A conversation, in which the assistant goes on with what it says last, and where its part begins."""
    if prompt[-1]["role"] != "assistant" or given[0]["role"] != "assistant":
        return len(prompt), [*prompt, *given]
    before, after = prompt[-1]["content"] or "", given[0]["content"] or ""
    if isinstance(before, str) and isinstance(after, str):
        content: Any = before + after
    else:
        content = [part for one in (before, after) for part in in_parts({"content": one})["content"]]
    return len(prompt) - 1, [*prompt[:-1], {**given[0], "content": content}, *given[1:]]


def _by_dataset(ids: list[int]) -> Given:
    return Given(ids, [Author.DATASET] * len(ids))


class _Rendering:
    """A chat template that renders the messages of a row."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, Any],
        see: Callable[..., list[int]] | None,
        where: str,
    ) -> None:
        self._tokenizer, self._template, self._see, self._where = tokenizer, template, see, where

    def __call__(self, messages: list[Any], **options: bool) -> list[int]:
        """Token ids."""
        return list(self._made(messages, **options)["input_ids"])

    def _made(self, messages: list[Any], **options: bool) -> Mapping[str, Any]:
        try:
            if self._see is not None:
                return {"input_ids": self._see(messages, **options)}
            made: Any = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, **{**self._template, **options}
            )
        except (TemplateError, TypeError) as error:  # a TypeError where content parts are joined as text
            raise ValueError(
                f"{self._where}: the tokenizer's chat template rejects the prompt with its completion: {error}."
            ) from error
        return made

    def authors(
        self, messages: list[Any], start: int, whole: list[int], ends: Collection[int], **options: bool
    ) -> list[int]:
        """The author of each token: the dataset of what the assistant says, with the token that ends it.

        By the marks of the template, if it has them; else from turns rendered one by one. The beginning of a turn with
        which prompts end, and what follows its end token, are the environment's: no student generates them.
        """
        template = self._template.get("chat_template") or self._tokenizer.chat_template
        is_marked = re.search(r"{%-?\s*generation\s*-?%}", str(template)) and self._see is None
        found = [int(Author.ENVIRONMENT)] * len(whole)
        for begin, end in (self._marked if is_marked else self._rendered)(messages, start, whole, options):
            end += bool({*whole[end : end + 1]} & {*ends})  # in some templates it begins the next message
            said = cut_after_end(whole[begin:end], ends)
            found[begin : begin + len(said)] = [int(Author.DATASET)] * len(said)
        return found

    def _marked(self, messages: list[Any], start: int, whole: list[int], options: Any) -> Iterator[tuple[int, int]]:
        """Where each turn of the assistant begins and ends."""
        marks = self._made(messages, return_assistant_tokens_mask=True, **options)["assistant_masks"]
        edges = [place for place, pair in enumerate(pairwise([0, *marks, 0])) if pair[0] != pair[1]]
        prompt = self(messages[:start], add_generation_prompt=True)
        opening = prompt[len(self(messages[:start], add_generation_prompt=False)) :]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            within = range(begin, begin + len(opening) + 1)  # some templates mark the end of the opening, or all of it
            yield next((one for one in within if whole[one - len(opening) : one] == opening), begin), end

    def _rendered(self, messages: list[Any], start: int, whole: list[int], _: Any) -> Iterator[tuple[int, int]]:
        for place in range(start, len(messages)):
            if messages[place]["role"] != "assistant":
                continue
            before, is_last = self(messages[:place], add_generation_prompt=True), place == len(messages) - 1
            after = whole if is_last else self(messages[: place + 1], add_generation_prompt=False)
            for part in (before, after):
                if whole[: len(part)] != part:
                    at = next(at for at, token in enumerate(part) if whole[at : at + 1] != [token])
                    became = [self._tokenizer.decode(ids[max(0, at - 16) : at + 16]) for ids in (part, whole)]
                    raise ValueError(
                        f"{self._where}: the chat template renders message {place} in another way once others follow, "
                        f"so its tokens are not known: {became[0]!r} became {became[1]!r}. Use a template that marks "
                        "what the assistant says with `{% generation %}`, such as one of TRL's."
                    )
            yield len(before), len(after)


def _warn_of_loss(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Warns once that a template changes answers; some templates strip reasoning, others calls."""
    turns = [one for one in messages if one["role"] == "assistant"]
    calls = [call.get("function", call)["name"] for one in turns for call in one.get("tool_calls") or ()]
    said = [one["content"].strip() for one in turns if isinstance(one["content"], str)]
    if not all(one in text for one in (*said, *calls)):
        logger.warning_once(
            "The tokenizer's chat template changes or drops parts of the dataset's answers, as some templates do with "
            "the text before '</think>': the student learns the rendered answer. If this is not intended, give prompts "
            "and completions as text."
        )
