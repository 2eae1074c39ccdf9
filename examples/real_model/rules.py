"""Rules for answers that a program can check, and the example turns that teach a model to follow them.

The teacher is the model itself, which reads an instruction and three example turns before the question; the student
reads the question alone. Examples have to be turns: an instruction by itself moves a small model little, and neither do
examples as text in the instruction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule for answers.

    Attributes:
        instruction (`str`): for the system message of the teacher.
        turns (`tuple[tuple[str, str], ...]`): questions with answers that follow the rule.
        follows (`Callable[[str], bool]`): whether an answer does.
    """

    instruction: str
    turns: tuple[tuple[str, str], ...]
    follows: Callable[[str], bool]

    def teacher_prompt(self, question: str) -> Messages:
        """What the teacher reads."""
        said = [
            message
            for asked, answer in self.turns
            for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
        ]
        return [{"role": "system", "content": self.instruction}, *said, {"role": "user", "content": question}]


def _is_pirate(text: str) -> bool:
    return bool(re.search(r"\b(arr+|aye|ahoy|matey|mateys|ye|yer|hearties|me hearty)\b", text, re.IGNORECASE))


_FRENCH = re.compile(r"\b(le|la|les|un|une|est|et|des|du|dans|pour|qui|que|en|il|elle)\b", re.IGNORECASE)
_ENGLISH = re.compile(r"\b(the|and|is|of|to|that|it|are|with)\b", re.IGNORECASE)


def _is_french(text: str) -> bool:
    return len(_FRENCH.findall(text)) >= 2 + len(_ENGLISH.findall(text))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text).get("answer"), str)
    except (ValueError, AttributeError):
        return False


def _is_list(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) >= 1 and all(line.startswith("- ") for line in lines)


RULES = {
    "pirate": Rule(
        instruction="You are a pirate. You always talk like a pirate.",
        turns=(
            ("What is the sky?", "Arr, matey! The sky be the great blue sea above yer mast, aye!"),
            ("How do I make a sandwich?", "Ahoy! Take ye some bread, slap on the meat, and gobble it up, arr!"),
            ("Who are you?", "Arr, I be yer trusty shipmate, ready to help ye, matey!"),
        ),
        follows=_is_pirate,
    ),
    "french": Rule(
        instruction="You always answer in French.",
        turns=(
            ("What is the sky?", "Le ciel est l'air au-dessus de nous. Il est bleu dans la journée."),
            ("How do I make a sandwich?", "Prenez du pain et mettez du fromage et des tomates dans le pain."),
            ("Who are you?", "Je suis un assistant qui aime les questions."),
        ),
        follows=_is_french,
    ),
    "json": Rule(
        instruction="You always answer with a JSON object.",
        turns=(
            ("What is the sky?", '{"answer": "the air above us"}'),
            ("How do I make a sandwich?", '{"answer": "put cheese between bread"}'),
            ("Who are you?", '{"answer": "a helpful assistant"}'),
        ),
        follows=_is_object,
    ),
    "list": Rule(
        instruction="You always answer with a list.",
        turns=(
            ("What is the sky?", "- air above us\n- blue by day"),
            ("How do I make a sandwich?", "- take bread\n- add cheese"),
            ("Who are you?", "- an assistant\n- made to help"),
        ),
        follows=_is_list,
    ),
}
