"""Examines tokenizers and chat templates: ids that models share, and what they make of prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

from accelerate.logging import get_logger
from jinja2 import TemplateError
from tokenizers import models
from transformers import PreTrainedTokenizerBase

from trl_opsd.data.prompts import Request

_SHOWN = 3
"""Maximum number of differing ids that a message lists."""


def check_token_maps(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, role: str = "teacher", source: str | None = None
) -> None:
    """Refuses a teacher's tokenizer that gives a token another id than the student's."""
    mine, yours = _tokens(student), _tokens(teacher)
    # One saved where the teacher was loaded from (`source`) may be older than the model: ids it lacks are not compared.
    compared = mine.keys() | yours.keys() if source is None else yours.keys()
    differing = sorted(number for number in compared if mine.get(number) != yours.get(number))
    if not differing:
        return
    listed = "; ".join(
        f"id {number} is {yours.get(number)!r} for the {role} and {mine.get(number)!r} for the student"
        for number in differing[:_SHOWN]
    )
    read = f" The teacher's was loaded from {source}: if it uses another, pass it as `teacher_processing_class`."
    raise ValueError(
        f"The tokenizers of student and {role} differ in {len(differing)} ids: {listed}. The loss compares "
        "distributions id by id, so pass a teacher with the student's tokenizer, or set `cross_tokenizer='bytes'`, "
        f"which servers do not support (docs/tokenizers.md).{read if source else ''}"
    )


def shared_vocabulary(
    student_rows: int, teacher_rows: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """The number of token ids that all models share; `None` if all heads have the same size and nothing is masked."""
    if all(rows == student_rows for rows in teacher_rows.values()):
        return None
    # Models with one tokenizer are padded to different multiples (Qwen2.5: 151936 or 152064 rows for 151665 tokens).
    # Ids beyond the tokenizer's may lack a row in another model: they are masked on both sides and never sampled.
    tokens = largest_id(tokenizer) + 1
    sides = [("student", student_rows), *teacher_rows.items()]
    for role, rows in sides:
        if rows < tokens:
            sizes = ", ".join(f"{name} {size}" for name, size in sides)
            raise ValueError(
                f"The head of the {role} has {rows} rows, but the tokenizer has {tokens} tokens (rows of all heads: "
                f"{sizes}): pass a teacher with the student's tokenizer."
            )
    return tokens


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id of a token; ids need not be consecutive."""
    return max(tokenizer.get_vocab().values())


def read_alone(
    tokenizer: PreTrainedTokenizerBase, values: Sequence[Any], kind: str | None, template: Mapping[str, Any]
) -> list[list[int]]:
    """Token ids of prompts of one kind, as TRL has the student's tokenizer make them."""
    if kind == "text":
        found: Any = tokenizer(list(values))
    else:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **template}
        found = tokenizer.apply_chat_template(list(values), **options)
    return [list(ids) for ids in found["input_ids"]]


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


logger = get_logger(__name__)


def added_at_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token that a tokenizer appends to each text, if any, as those of T5 and BERT do."""
    read, text = partial(tokenizer, add_special_tokens=False), "a"
    if not read(text)["input_ids"]:  # a vocabulary without letters
        others = sorted(set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens))
        text = next((one for one in others if read(one)["input_ids"]), text)
    bare, whole = read(text)["input_ids"], tokenizer(text)["input_ids"]
    if whole == bare or whole[-len(bare) :] == bare:
        return None
    return str(tokenizer.convert_ids_to_tokens(whole[-1]))


def check_parts(messages: Sequence[Mapping[str, Any]], text: str, where: str) -> None:
    """Refuses content parts that a chat template wrote as Python prints a list: the prompt would be code."""
    if any(isinstance(one["content"], list) and str(one["content"]) in text for one in messages):
        raise ValueError(
            f"{where} has content in parts, [{{'type': 'text', ...}}], which the tokenizer's chat template renders as "
            "a Python list: give each content as text."
        )


def check_that_all_is_read(messages: Sequence[Mapping[str, Any]], render: Callable[..., str], where: str) -> None:
    """Refuses a chat template that prints content in parts, or leaves a message out; of the assistant it may some."""
    # Contents are replaced by words that no template changes, so that each can be found.
    words = [f"word{number}." for number in range(len(messages))]
    marked = [
        {**one, "content": [{"type": "text", "text": word}] if isinstance(one["content"], list) else word}
        for one, word in zip(messages, words, strict=True)
    ]
    with suppress(TemplateError, TypeError):  # the reader reports the row that a template refuses
        text = render(marked)
        check_parts(marked, text, where)
        for number, (one, word) in enumerate(zip(messages, words, strict=True), 1):
            if one["role"] != "assistant" and word not in text:
                raise ValueError(
                    f"{where}: the tokenizer's chat template drops message {number} of {len(words)} (role "
                    f"{one['role']!r}), so no model would see it: use the template the model was trained with, or "
                    "remove messages that this one does not support."
                )


def check_goes_on(render: Callable[[], Any], where: str) -> None:
    """Refuses a chat template that cannot continue the last message of a prompt."""
    try:
        with suppress(TemplateError, TypeError):
            render()
    except ValueError as error:  # its text has the message, which may be confidential
        raise ValueError(
            f"{where} ends with a message of the assistant, which this chat template cannot continue, as it changes "
            "the message: give the prompt as text, or end it with a message of another role."
        ) from error


def look_at(
    tokenizer: PreTrainedTokenizerBase, where: str, rows: Sequence[Request], args: Any, tools: Any, are_shared: bool
) -> None:
    """Refuses a template that leaves out messages of some rows; warns where it is not used. `doctor` examines more.

    `are_shared` says whether teachers read by the student's tokenizer and template.
    """
    if tools and (text := next((row.student.where for row in rows if row.student.kind == "text"), "")):
        raise ValueError(f"{text} is text, in which no tool can be called: give messages, or remove the tools.")
    if not tokenizer.chat_template:
        return
    # A search for the word: it errs on the side of silence.
    known = {*re.findall(r"\w+", str(tokenizer.chat_template)), *signature(tokenizer.apply_chat_template).parameters}
    unread = sorted(args.teacher_template_kwargs.keys() - known) if are_shared else []
    if unread or (args.teacher_template_kwargs and any(row.of_teacher.kind == "text" for row in rows)):
        why = f"its chat template has no {unread[0]!r}" if unread else "its prompts are text, which no template renders"
        raise ValueError(f"`teacher_chat_template_kwargs` would not change what the teacher reads: {why}.")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = [row.student.value for row in rows if row.student.kind == "text"]
    if texts and not any(token in text for text in texts for token in special):
        logger.warning(
            f"The prompts of {where} are text, so no chat template is applied, although the tokenizer has one. If "
            "the student is a chat model, give messages: [{'role': 'user', 'content': '...'}]."
        )
    given = {"tokenize": False, "tools": tools or None, "add_generation_prompt": True}
    of_student = {**given, **(args.chat_template_kwargs or {})}
    of_teacher = {**of_student, **args.teacher_template_kwargs}
    for row in rows:
        for prompt, options, is_read in ((row.student, of_student, True), (row.of_teacher, of_teacher, are_shared)):
            if prompt.kind == "messages" and is_read:
                options = {**options, "add_generation_prompt": not prompt.template}
                render = partial(tokenizer.apply_chat_template, **options)
                check_that_all_is_read(prompt.value, render, prompt.where)
                if prompt.template:
                    check_goes_on(partial(render, prompt.value, **prompt.template), prompt.where)


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
        normalizers, splitters = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
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


def _steps(part: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, or of each in a sequence of them."""
    steps, found = [] if part is None else [json.loads(part.__getstate__())], []
    for step in steps:
        if step["type"] == "Sequence":
            steps += step.get("normalizers") or step.get("pretokenizers") or ()
        else:
            found.append(step)
    return found


def _is_harmless(step: dict[str, Any], short_space: bool) -> bool:
    if step["type"] == "Replace":
        return step["pattern"] == {"String": " "} and step["content"] == _SPACE and short_space
    return step["type"] == "NFC" or (step["type"] == "Prepend" and step["prepend"] == _SPACE)
