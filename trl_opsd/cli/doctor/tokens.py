"""Checks of tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from trl_opsd.cli.doctor.pair import Pair, Side
from trl_opsd.data.chat_templates import check_that_all_is_read
from trl_opsd.data.vocabulary import check_token_maps, largest_id
from trl_opsd.models.probe_runner import Doubt
from trl_opsd.models.special_tokens import ensure_special_tokens

_QUESTION = {"role": "user", "content": "A question."}
_ANSWER = {"role": "assistant", "content": "An answer."}


def same_ids(pair: Pair) -> str:
    """Both tokenizers give every token the same id."""
    if pair.assumes_tokenizer:
        raise Doubt("The teacher has no tokenizer to compare: it is assumed to read the student's tokens.")
    check_token_maps(pair.student.tokenizer, pair.teacher.tokenizer)
    return f"The same {len(pair.student.tokenizer.get_vocab())} tokens, id by id."


def same_sizes(pair: Pair) -> str:
    """Both heads have a row for each token."""
    shared, rows = pair.vocabulary, (pair.student.rows, pair.teacher.rows)
    tokens = largest_id(pair.student.tokenizer) + 1
    if tokens > rows[0]:
        raise ValueError(
            f"The tokenizer has {tokens} tokens, but both heads have {rows[0]} rows: use the tokenizer that the models "
            "were trained with."
        )
    if shared is None:
        return f"Both heads have {rows[0]} rows."
    return f"Heads of {rows[0]} and {rows[1]} rows; the {shared} ids of the tokenizer are compared."


def end_token(pair: Pair) -> str:
    """A completion can end, and the generation config knows with which tokens."""
    tokenizer = pair.student.tokenizer
    ensure_special_tokens(tokenizer, pair.student.rows)
    known = end_ids(pair.student)
    if tokenizer.eos_token_id not in known:
        shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(known)))
        raise Doubt(
            f"The tokenizer ends texts with {tokenizer.eos_token!r}, the generation config with {shown}: make them "
            "agree, or completions may not end where the tokenizer says."
        )
    return f"{tokenizer.eos_token!r}, id {tokenizer.eos_token_id}."


def end_ids(side: Side) -> list[int]:
    """The ids that end a completion, as the model's generation config has them; the tokenizer's, if it has none."""
    found = side.model.generation_config.eos_token_id
    listed = found if isinstance(found, list) else [] if found is None else [found]
    return listed or [side.tokenizer.eos_token_id]


def template(pair: Pair) -> str:
    """The chat template writes all that the user says, opens the answer, and closes it with an end token."""
    mine = pair.student.tokenizer
    if mine.chat_template is None:
        raise Doubt("The tokenizer has no chat template: prompts have to be text, not conversations.")
    check_that_all_is_read([_QUESTION, _ANSWER, _QUESTION], partial(_rendered, mine), "A conversation")
    opening = _rendered(mine).removeprefix(str(mine.apply_chat_template([_QUESTION], tokenize=False)))
    if not opening:
        raise ValueError(
            "The chat template writes no generation prompt: with `add_generation_prompt=True` it renders the same as "
            "without, so that the student has to write the beginning of its own turn. Use a template that reads "
            "`add_generation_prompt`, as that of an instruct model."
        )
    if pair.teacher.tokenizer.chat_template and _rendered(pair.teacher.tokenizer) != _rendered(mine):
        raise Doubt(
            "The teacher's chat template renders a conversation otherwise than the student's, which is used for both: "
            "the teacher reads a format that it was not trained on."
        )
    _check_ending(pair.student)
    return f"Opens an answer with {opening!r}."


def _check_ending(side: Side) -> None:
    text = side.tokenizer.apply_chat_template([_QUESTION, _ANSWER], tokenize=False)
    ends = [token for token in side.tokenizer.convert_ids_to_tokens(end_ids(side)) if token]
    after = str(text).rpartition(str(_ANSWER["content"]))[2]
    if ends and not any(token in after for token in ends):
        raise Doubt(
            f"After an answer the chat template writes {after!r}, in which there is no end token ({', '.join(ends)}): "
            "a model trained on it never learned to end, and completions run to their limit."
        )


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]] = (_QUESTION,)) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
