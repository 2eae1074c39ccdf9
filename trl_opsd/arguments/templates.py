"""Checks what a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.logging import get_logger
from transformers import PreTrainedTokenizerBase

from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import Rows
from trl_opsd.data.chat_templates import check_template_arguments, warn_of_bare_text

logger = get_logger(__name__)


def check_template(tokenizer: PreTrainedTokenizerBase, datasets: Mapping[str, Rows], args: OPSDConfig) -> None:
    """Checks what the chat template is given: its arguments, and whether prompts are meant for it.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The student's, whose template is used for both models.
        datasets (`Mapping[str, Rows]`):
            What is known of the rows, by dataset.
        args ([`OPSDConfig`]):
            Contains the arguments of the template.

    Raises:
        ValueError: The template does not read an argument that the teacher's prompts are to differ in.
    """
    if wrong := check_template_arguments(tokenizer, "teacher_chat_template_kwargs", args.teacher_template_kwargs):
        raise ValueError(wrong)
    if wrong := check_template_arguments(tokenizer, "chat_template_kwargs", args.chat_template_kwargs or {}):
        logger.warning(wrong)
    for rows in datasets.values():
        some = rows.first_prompts()
        if some and all(isinstance(prompt, str) for prompt in some):
            warn_of_bare_text(tokenizer, rows.where, some)
            break
