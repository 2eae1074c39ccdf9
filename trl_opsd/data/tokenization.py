"""Examines tokenizers and chat templates: ids that models share, and what they make of prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from inspect import signature
from os.path import commonprefix
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
        f"id {number} is {_named(yours, number)} for the {role} and {_named(mine, number)} for the student"
        for number in differing[:_SHOWN]
    )
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    read = (
        f" The teacher's was loaded from {source}, like the teacher: if it uses another one, pass it as "
        "`teacher_processing_class`."
    )
    raise ValueError(
        f"The tokenizers of student and {role} differ: {listed}{more}. The loss compares distributions id by id, so "
        "pass a teacher with the student's tokenizer; or, unless a server has it, set `cross_tokenizer='bytes'`."
        f"{read if source else ''}"
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


def _named(tokens: Mapping[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "nothing"


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
"""Arguments of `apply_chat_template` that TRL passes, or that contradict these."""
_ANSWER = "The answer."
"""An answer that shows what a template writes around it."""


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


def check_template_arguments(tokenizer: PreTrainedTokenizerBase, option: str, names: Collection[str]) -> str | None:
    """Why chat template arguments have no effect, in words, or `None`; refuses arguments that the trainer sets."""
    if taken := sorted(_TAKEN & set(names)):
        raise ValueError(f"`{option}` sets {taken[0]!r}, which is set by the trainer: remove it.")
    template = str(tokenizer.chat_template or "")  # a dict of several is searched as a whole
    # A word search rather than an analysis of the template: it errs on the side of silence.
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    unread = [name for name in names if name not in words | signature(tokenizer.apply_chat_template).parameters.keys()]
    if not template or not unread:
        return None
    near = get_close_matches(unread[0], words, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]!r}?" if near else "remove it, or use a template that uses it."
    return f"`{option}` sets {unread[0]!r}, which the tokenizer's chat template does not use: {hint}"


def check_parts(messages: Sequence[Mapping[str, Any]], text: str, where: str) -> None:
    """Refuses content parts that a chat template wrote as Python prints a list: the prompt would be code."""
    if any(isinstance(one["content"], list) and str(one["content"]) in text for one in messages):
        raise ValueError(
            f"{where} has content in parts, [{{'type': 'text', ...}}], which the tokenizer's chat template renders as "
            "a Python list: give each content as text."
        )


def check_that_all_is_read(messages: Sequence[Mapping[str, Any]], render: Callable[..., str], where: str) -> None:
    """Refuses a chat template that leaves a message out; those of the assistant it may shorten."""
    # Contents are replaced by words that no template changes, so that each can be found.
    words = [f"word{number}." for number in range(len(messages))]
    marked = [
        {**one, "content": [{"type": "text", "text": word}] if isinstance(one["content"], list) else word}
        for one, word in zip(messages, words, strict=True)
    ]
    with suppress(TemplateError, TypeError):  # the reader reports the row that a template refuses
        text = render(marked)
        for number, (one, word) in enumerate(zip(messages, words, strict=True), 1):
            if one["role"] != "assistant" and word not in text:
                raise ValueError(
                    f"{where}: the tokenizer's chat template drops message {number} of {len(words)} (role "
                    f"{one['role']!r}), so no model would see it: use the template the model was trained with, or "
                    "remove messages that this one does not support."
                )


def warn_of_prompts(
    tokenizer: PreTrainedTokenizerBase, where: str, prompts: Sequence[Any], render: Callable[..., str]
) -> None:
    """Renders some prompts as a model will see them, and warns of what is seldom meant."""
    if all(isinstance(prompt, str) for prompt in prompts):
        if tokenizer.chat_template and not any(token in text for text in prompts for token in _special(tokenizer)):
            logger.warning(
                f"The prompts of {where} are text, so no chat template is applied, although the tokenizer has one. If "
                "the student is a chat model, give messages: [{'role': 'user', 'content': '...'}]."
            )
        names = (f"The prompt in row {number} of {where}" for number in range(len(prompts)))
        warn_of_ended_text(tokenizer, dict(zip(names, prompts, strict=True)), render)
    elif tokenizer.chat_template:
        with suppress(TemplateError, TypeError):  # the reader reports the row that a template refuses
            _warn_of_template(where, prompts, render)


def warn_of_ended_text(
    tokenizer: PreTrainedTokenizerBase, prompts: Mapping[str, str], render: Callable[..., str]
) -> None:
    """Warns of the first text prompt that ends as an answer does, so that nothing is left to generate."""
    ends = {str(tokenizer.eos_token)}
    if tokenizer.chat_template:
        with suppress(TemplateError, TypeError):
            _, end = _around_answer([{"role": "user", "content": "?"}], render)
            ends.update({end} & set(_special(tokenizer)))
    for name, prompt in prompts.items():
        text = prompt.rstrip()
        if found := next((end for end in ends if text.endswith(end) and text != end), None):
            logger.warning(
                f"{name} ends with the end token {found!r}, so there is nothing left to generate: end it where the "
                "answer begins, or give messages, to which the chat template adds the generation prompt."
            )
            return


def look_at(tokenizer: PreTrainedTokenizerBase, where: str, rows: Sequence[Request], args: Any, tools: Any) -> None:
    """Refuses a template that leaves out messages of some rows, and warns of what is seldom meant in their prompts."""
    render = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        tools=tools or None,
        **{"add_generation_prompt": True, **(args.chat_template_kwargs or {})},
    )
    warn_of_prompts(tokenizer, where, [row.student.value for row in rows], render)
    if tools and (text := next((row.student.where for row in rows if row.student.kind == "text"), "")):
        raise ValueError(f"{text} is text, in which no tool can be called: give messages, or remove the tools.")
    for row in rows if tokenizer.chat_template else ():
        theirs_too = ((row.of_teacher, partial(render, **args.teacher_template_kwargs)),)
        for prompt, read in ((row.student, render), *(() if args.cross_tokenizer else theirs_too)):
            if prompt.kind == "messages":
                check_that_all_is_read(prompt.value, read, prompt.where)
    theirs = (row.of_teacher for row in rows if row.of_teacher is not row.student)
    warn_of_ended_text(tokenizer, {one.where: one.value for one in theirs if one.kind == "text"}, render)


_ROLES = {"system", "developer", "user", "assistant", "tool"}
"""Those that templates know; another is dropped, or written as it is."""


def _warn_of_template(where: str, prompts: Sequence[Any], render: Callable[..., str]) -> None:
    if other := {str(one["role"]) for messages in prompts for one in messages} - _ROLES:
        logger.warning(
            f"Messages in {where} have roles that chat templates seldom know: {', '.join(sorted(other))}. Name them "
            "'user', 'assistant' or 'system', unless the template has them."
        )
    for number, messages in enumerate(prompts):
        check_parts(messages, render(messages), f"The prompt in row {number} of {where}")
    before, _ = _around_answer(prompts[0], render)
    if before and render(prompts[0], add_generation_prompt=False) == render(prompts[0]):
        logger.warning(
            f"The tokenizer's chat template renders {before!r} before an answer, but not at the end of a prompt: it "
            "ignores `add_generation_prompt`, so the student would have to generate it. Use a template that supports "
            "it."
        )


def _around_answer(messages: list[Any], render: Callable[..., str]) -> tuple[str, str]:
    """What a template writes between a prompt and its answer, and after the answer."""
    prompt = render(messages)
    whole = render([*messages, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    # A template may write the prompt alone and with an answer differently; what differs begins after the common part.
    shared = len(commonprefix([prompt, whole]))  # noqa: RUF071 (characters are meant)
    before, _, after = whole[shared:].rpartition(_ANSWER)
    return before.strip(), after.strip()


def _special(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


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
