"""Checks what a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from accelerate.logging import get_logger
from transformers import PreTrainedTokenizerBase

from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import Rows
from trl_opsd.data.chat_templates import (
    check_template_arguments,
    check_that_all_is_read,
    warn_of_ended_text,
    warn_of_prompts,
)
from trl_opsd.data.readers import Intake, Request

logger = get_logger(__name__)


def check_template(
    tokenizer: PreTrainedTokenizerBase, datasets: Mapping[str, Rows], args: OPSDConfig, tools: Any, intake: Intake
) -> None:
    """Checks what the chat template is given: its arguments, and whether prompts are meant for it."""
    if wrong := check_template_arguments(tokenizer, "teacher_chat_template_kwargs", args.teacher_template_kwargs):
        raise ValueError(wrong)
    if wrong := check_template_arguments(tokenizer, "chat_template_kwargs", args.chat_template_kwargs or {}):
        logger.warning(wrong)
    rows = next(iter(datasets.values()))
    if some := rows.first_requests(intake):
        look_at(tokenizer, rows.where, some, args, tools)


def look_at(
    tokenizer: PreTrainedTokenizerBase, where: str, rows: Sequence[Request], args: OPSDConfig, tools: Any
) -> None:
    """Refuses a template that leaves out messages of some rows, and warns of what is seldom meant in their prompts."""
    render = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        tools=tools or None,
        **{"add_generation_prompt": True, **(args.chat_template_kwargs or {})},
    )
    warn_of_prompts(tokenizer, where, [row.student.value for row in rows], render)
    for row in rows if tokenizer.chat_template else ():
        for prompt, read in ((row.student, render), (row.of_teacher, partial(render, **args.teacher_template_kwargs))):
            if prompt.kind == "messages":
                check_that_all_is_read(prompt.value, read, prompt.where)
    theirs = (row.of_teacher for row in rows if row.of_teacher is not row.student)
    warn_of_ended_text(tokenizer, {one.where: one.value for one in theirs if one.kind == "text"}, render)
