"""A tokenizer for walks through mazes, with a chat template for calls of a tool, and how these are read from text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, USER, ASSISTANT, TOOL, CALL, CALLED, END = SPECIAL_TOKENS = (
    *("<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("<|call|>", "<|/call|>", "<|end|>"),
)

PIECES = (
    *('{"name": "try_door", "arguments": {"maze": "', '", "room": ', ', "door": ', "}}"),
    *("maze ", ", ", " rooms", "\n\n", "doors", " ", "open, room ", "closed, room ", "out", *"0123456789"),
)
"""Texts that are one token each, those that contain others first."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<|call|>{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{{ call['function']['arguments'] | tojson }}}<|/call|>"
    "{% endfor %}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close": CALLED,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}
"""How transformers reads a message from tokens; see "Response parsing" in its documentation."""


def make_tokenizer(pieces: Sequence[str] = PIECES) -> PreTrainedTokenizerFast:
    """The tokenizer of all models, with 30 tokens.

    Example:

    ```python
    >>> make_tokenizer().tokenize("maze 0042, 2 rooms")
    ['maze ', '0', '0', '4', '2', ', ', '2', ' rooms']
    ```
    """
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *pieces])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    escaped = "|".join("".join(f"\\{one}" if not one.isalnum() else one for one in piece) for piece in pieces)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(escaped), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, TOOL, CALL, CALLED],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        model_max_length=512,
        padding_side="left",
    )
